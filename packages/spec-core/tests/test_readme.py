import re
from pathlib import Path

import spec_core

README = Path(__file__).parents[1] / "README.md"
SOURCE = Path(spec_core.__file__).parent


def test_the_example_of_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    *rounds, last = capsys.readouterr().out.splitlines()
    assert rounds[0].startswith("prefill (")
    assert all(line.startswith(("verify (", "plain (")) for line in rounds[1:])
    assert re.fullmatch(r"[1-4]\.\d\d tokens per target forward", last)


def test_the_readme_lists_every_module_and_stays_short():
    text = README.read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "toys"}
    assert listed == modules
    assert len(text.splitlines()) <= 80


def test_every_public_name_is_there():
    assert all(hasattr(spec_core, name) for name in spec_core.__all__)
    assert spec_core.__all__ == sorted(spec_core.__all__)
