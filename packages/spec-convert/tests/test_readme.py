"""What the README shows works as shown."""

import re
from pathlib import Path

from click.testing import CliRunner

from spec_convert.cli import cli
from spec_convert.families import ARCHITECTURES
from spec_convert.repack import LAYOUTS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs(make_llama, tmp_path, monkeypatch, capsys):
    make_llama().rename(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("True ") and len(printed) == 21
    assert (tmp_path / "my-model" / "config.json").exists()


def test_the_commands_run(make_llama, tmp_path, monkeypatch):
    make_llama().rename(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    spec-convert (.*)$", README, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["inspect", "convert", "verify"]
    for command in commands:
        assert CliRunner().invoke(cli, command.split()).exit_code == 0


def test_every_type_and_architecture_is_listed():
    for name in [*(kind.name for kind in LAYOUTS), *ARCHITECTURES]:
        assert re.search(rf"\b{name}\b", README), name


def test_it_is_short():
    assert len(README.splitlines()) <= 80
