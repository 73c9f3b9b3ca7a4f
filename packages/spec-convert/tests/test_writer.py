from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spec_convert.errors import ConvertError
from spec_convert.writer import Entry, SafetensorsWriter, check_target, staged_folder


def test_pieces_in_any_order_make_a_file_the_reference_library_reads(tmp_path: Path):
    wide, narrow = np.arange(12, dtype="<u4").reshape(4, 3), np.arange(5, dtype="<f2")
    entries = [Entry("narrow", "F16", (5,)), Entry("wide", "U32", (4, 3))]
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, entries, {"format": "mlx"}) as writer:
        writer.append("wide", wide[:1])
        writer.append("narrow", narrow)
        writer.append("wide", wide[1:])
    loaded = load_file(path)
    assert np.array_equal(loaded["wide"], wide) and np.array_equal(loaded["narrow"], narrow)


def test_a_tensor_left_unfinished_is_our_bug(tmp_path: Path):
    with (
        pytest.raises(AssertionError, match="not written whole"),
        SafetensorsWriter(tmp_path / "x", [Entry("a", "F32", (2,))], {}) as writer,
    ):
        writer.append("a", np.zeros(1, "<f4"))


def test_a_folder_appears_when_the_block_ends(tmp_path: Path):
    out = tmp_path / "deep" / "out"
    with staged_folder(out, force=False) as staging:
        (staging / "config.json").write_text("{}")
        assert not out.exists() and staging.parent == out.parent
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_interrupted_block_leaves_nothing(tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staged_folder(out, force=False) as staging:
        (staging / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_replacement_keeps_the_earlier_output(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    with pytest.raises(RuntimeError), staged_folder(out, force=True):
        raise RuntimeError
    assert (out / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_replaces_an_earlier_output_whole(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_text("old")
    with staged_folder(out, force=True) as staging:
        (staging / "config.json").write_text("new")
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_existing_output_is_kept_without_force(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match="must not exist yet, got a folder with 1 entries"):
        check_target(tmp_path, force=False)


def test_force_never_deletes_files_of_others(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ConvertError, match='also holds "thesis.tex"'):
        check_target(tmp_path, force=True)


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConvertError, match="must be a folder, got a file"):
        check_target(tmp_path / "out", force=True)


def test_an_empty_folder_may_be_filled(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with staged_folder(out, force=False) as staging:
        (staging / "config.json").write_text("{}")
    assert (out / "config.json").exists()


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path):
    out = tmp_path / "out"
    with (
        pytest.raises(ConvertError, match="could not be written: No space left"),
        staged_folder(out, force=False) as staging,
    ):
        (staging / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
