import shutil
from pathlib import Path

import mlx.core as mx

from spec_calibrate import key_for, model_identity
from spec_calibrate.keys import device


def _checkpoint(folder: Path, value: float = 1.0, n: int = 400_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    weights = mx.full((n,), value)
    mx.save_safetensors(str(folder / "model.safetensors"), {"w": weights})
    return folder


def test_a_key_says_what_it_was_made_for():
    key = key_for(model="abc", quantisation="4 bits", kv_bits=8, drafter="dspark", kernels="on")
    assert key.model == "abc" and key.kv_bits == 8 and key.device == device()
    assert key.packages["spec-core"] and "spec-calibrate" in key.packages
    assert key.mlx and key.system


def test_one_set_up_has_one_key():
    assert key_for(model="abc").digest == key_for(model="abc").digest
    assert key_for(model="abc").digest != key_for(model="abc", kernels="off").digest


def test_a_copy_of_a_checkpoint_is_the_same_model_under_any_name(tmp_path: Path):
    one = _checkpoint(tmp_path / "model")
    shutil.copytree(one, tmp_path / "copy")
    assert model_identity(one) == model_identity(tmp_path / "copy")


def test_the_same_name_in_another_place_is_not_the_same_model(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert model_identity(_checkpoint(tmp_path / "a" / "m", 1.0)) != model_identity(
        _checkpoint(tmp_path / "b" / "m", 2.0)
    )


def test_another_end_of_a_large_file_is_another_model(tmp_path: Path):
    one, two = _checkpoint(tmp_path / "one"), _checkpoint(tmp_path / "two")
    path = two / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)
    assert model_identity(one) != model_identity(two)


def test_a_folder_without_weights_still_has_an_identity(tmp_path: Path):
    assert model_identity(tmp_path)
