from pathlib import Path


def test_the_example_of_the_readme_runs(tmp_path: Path, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {"folder": tmp_path}
    exec(code, names)
    assert len(names["tokens"]) == 64  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().out.strip()
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert len(text.splitlines()) <= 80
