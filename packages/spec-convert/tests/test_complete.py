import json

import pytest

from spec_convert import convert, is_complete


@pytest.fixture
def folder(make_llama, tmp_path):
    out = tmp_path / "out"
    convert(make_llama(), out)
    assert is_complete(out)
    return out


def test_a_folder_in_several_files_is_complete_with_all_of_them(make_llama, tmp_path):
    out = tmp_path / "out"
    convert(make_llama(), out, shard_bytes=10_000)
    parts = sorted(out.glob("model-*.safetensors"))
    assert len(parts) > 1 and is_complete(out)
    parts[0].unlink()
    assert not is_complete(out)


def test_no_folder_and_an_empty_one_are_not_complete(tmp_path):
    assert not is_complete(tmp_path / "none")
    assert not is_complete(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_absent_file_is_noticed(folder, name):
    (folder / name).unlink()
    assert not is_complete(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("kept", [0.0, 0.5, -1])
def test_a_file_cut_short_is_noticed(folder, name, kept):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if kept >= 0 else -1])
    assert not is_complete(folder)


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]", b"<!DOCTYPE html>", bytes(100)],
)
def test_weights_that_are_no_safetensors_are_noticed(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert not is_complete(folder)


def test_a_list_of_files_that_is_none_is_noticed(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}) + "\n")
    assert not is_complete(folder)
