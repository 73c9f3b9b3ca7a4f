"""The README's example runs."""

import re
from pathlib import Path


def test_the_example_in_the_readme_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
