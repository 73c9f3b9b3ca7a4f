"""The cache of converted models: damaged, half made, not writable, or made by two at once."""

import json
import shutil
import threading

import pytest

import spec_convert
import spec_demo
from spec_cli import opening
from spec_core import SpecError


@pytest.fixture
def gguf():
    found = spec_demo.target_gguf()
    assert found is not None
    return found


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Counts conversions, and makes a tiny folder in place of each."""
    made = []

    def convert(source, out, *, progress=None, **options):
        made.append(out)
        out.mkdir()
        weights = b"\x02" + bytes(7) + b"{}"
        (out / "model.safetensors").write_bytes(weights)
        (out / "config.json").write_text('{"model_type": "llama"}\n')

    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(spec_convert, "convert", convert)
    return made


def test_a_whole_folder_is_used_again(gguf, conversions):
    assert opening.converted(gguf) == opening.converted(gguf)
    assert len(conversions) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_damaged_folder_is_made_again(gguf, conversions, name, damage):
    path = opening.converted(gguf) / name
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(b"" if damage == "empty" else content[:-1])
    assert spec_convert.is_complete(opening.converted(gguf))
    assert len(conversions) == 2


def test_what_a_killed_conversion_left_is_cleared(gguf, conversions):
    folder = opening.converted(gguf)
    left = folder.with_name(f".{folder.name}.abc123.partial")
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(10))
    (folder / "config.json").unlink()
    opening.converted(gguf)
    assert not left.exists()


def test_two_at_once_make_it_once(gguf, conversions):
    threads = [threading.Thread(target=opening.converted, args=(gguf,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_a_file_with_an_odd_name_gets_a_folder_with_a_plain_one(conversions, tmp_path):
    file = tmp_path / "[x] *? ü 1.5.gguf"
    file.write_bytes(b"GGUF")
    assert opening.converted(file).name.startswith("_x_______1.5-")
    long = tmp_path / f"{'ü' * 120}.gguf"
    long.write_bytes(b"GGUF")
    assert len(opening.converted(long).name) < 100


def test_another_version_of_the_converter_converts_anew(gguf, conversions, monkeypatch):
    first = opening.converted(gguf)
    monkeypatch.setattr(opening, "version", lambda name: "99.0")
    assert opening.converted(gguf) != first
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_made_is_refused_with_the_way_out(spec, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SPEC_CACHE_DIR", str(file))
    code, out, err = spec("generate", "hi")
    assert (code, out) == (1, "") and "SPEC_CACHE_DIR" in err and "[bug]" not in err
    with pytest.raises(SpecError, match="must be a writable folder"):
        opening.locate_model(None)


def test_a_truncated_real_conversion_answers_again(spec, gguf, tmp_path, demo_folder):
    folder = tmp_path / "cache" / "converted"
    arguments = ("generate", "Hi", "--raw", "--mode", "baseline", "--max-tokens", 1, "--json")
    assert spec(*arguments)[0] == 0
    (made,) = [path for path in folder.iterdir() if path.is_dir()]
    weights = made / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    code, out, err = spec(*arguments)
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 1
    shutil.rmtree(made)


def test_a_cache_without_room_names_the_variable_that_moves_it(gguf, conversions, monkeypatch):
    def full(*args, **options):
        raise spec_convert.ConvertError("[writer] .. must have 9 bytes free, got 0. Free some.")

    monkeypatch.setattr(spec_convert, "convert", full)
    with pytest.raises(spec_convert.ConvertError, match="got 0.*\nSPEC_CACHE_DIR names another"):
        opening.converted(gguf)
