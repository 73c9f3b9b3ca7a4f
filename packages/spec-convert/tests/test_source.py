import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from spec_convert import ConvertError, convert, verify
from spec_convert.source import Source


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model that the `gguf` package's writer divides into three files."""
    folder = tmp_path / "split"
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "any", split_max_tensors=2)
    for index in range(6):
        writer.add_tensor(f"t{index}.weight", np.full((4, 32), index, np.float32))
    writer.write_header_to_file(path=folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_a_split_model_reads_as_one(parts, tmp_path):
    assert [path.name for path in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for start in parts:
        with Source(start) as source:
            assert [tensor.name for tensor in source.container.tensors] == [
                f"t{index}.weight" for index in range(6)
            ]
            for index, tensor in enumerate(source.container.tensors):
                values = source.rows(tensor, 1, 3).view("<f4")
                assert values.shape == (2, 32) and (values == index).all()
    convert(parts[1], tmp_path / "out", raw_names=True)
    assert all(result.max_error == 0 for result in verify(tmp_path / "out", parts[0]))


def test_a_missing_part_is_named(parts, tmp_path):
    parts[2].unlink()
    with pytest.raises(ConvertError, match="model-00003-of-00003.gguf.*No such file"):
        convert(parts[0], tmp_path / "out", raw_names=True)
    assert not (tmp_path / "out").exists()


def test_parts_under_other_names_are_refused(parts, tmp_path):
    whole = shutil.copy(parts[0], tmp_path / "whole.gguf")
    with pytest.raises(ConvertError, match="one of 3 parts, got 1 by its name"):
        Source(whole)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ConvertError, match="must be part 2, got part 1"):
        Source(parts[0])


def test_a_name_that_claims_many_parts_is_refused(tmp_path):
    with pytest.raises(ConvertError, match="at most 10000 parts, got 99999"):
        Source(tmp_path / "model-00001-of-99999.gguf")


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ConvertError, match="must be a readable file: Is a directory"):
        Source(tmp_path)


def test_small_tensors_are_read_whole_and_large_ones_refused(make_gguf):
    tensors = {
        "small.weight": (np.float32([1, 2, 3]), gguf.GGMLQuantizationType.F16),
        "large.weight": (np.zeros((1024, 1024), np.float32), gguf.GGMLQuantizationType.F32),
    }
    with Source(make_gguf("x.gguf", "any", tensors, {})) as source:
        assert source.vector("small.weight") == [1, 2, 3]
        with pytest.raises(ConvertError, match="a short list of numbers, got 4194304 bytes"):
            source.vector("large.weight")
