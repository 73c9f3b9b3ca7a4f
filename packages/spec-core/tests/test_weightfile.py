"""What lies under a weight file's name: whole files pass, the others are told apart."""

import json
import struct

import mlx.core as mx
import pytest

from spec_core import LoadError
from spec_core.weightfile import check_weight_file

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def file_of(header: bytes, n_data: int = 16) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(n_data)


def text(header: dict) -> bytes:
    return json.dumps(header).encode()


WHOLE = {
    "plain": file_of(text({"a": A})),
    "empty metadata": file_of(text({"__metadata__": {}, "a": A})),
    "metadata only": file_of(text({"__metadata__": {"x": "y"}}), 0),
    "a header of 100,000 bytes": file_of(text({"a": A}).ljust(100_000)),
    "bytes behind the last tensor": file_of(text({"a": A}), 20),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_passes_and_mlx_reads_it(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE[name])
    check_weight_file(path)
    loaded = mx.load(str(path))
    assert {k: v.shape for k, v in loaded.items()} in ({"a": (2, 2)}, {})


def test_what_mlx_writes_passes(tmp_path):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((3, 5)), "b": mx.zeros((0,))}, {"x": "y"})
    check_weight_file(path)


OTHER = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid x\n", "a Git LFS pointer"),
    "page": (b"<!DOCTYPE html><html></html>", "an HTML page"),
    "nothing": (b"", "an empty or zeroed file"),
    "zeros": (bytes(500), "an empty or zeroed file"),
    "gguf": (b"GGUF" + bytes(60), "a GGUF file"),
    "absurd length": (struct.pack("<Q", 2**62) + b'{"a": 1}', "a cut or damaged file"),
    "big-endian": (struct.pack(">Q", 90) + b"{" + bytes(99), "a cut or damaged file"),
    "cut in the header": (file_of(text({"a": A}), 0)[:40], "a cut or damaged file"),
    "cut in the data": (
        file_of(text({"a": A}), 9), '9 bytes of data where "a" ends at 16',
    ),
    "twice": (file_of(b'{"a": %b, "a": %b}' % (text(A), text(A))), '"a" twice'),
    "not JSON": (file_of(b'{"a": '), "a header that cannot be read (JSONDecodeError)"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "a header that cannot be read"),
    "too deep": (file_of(b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), "cannot be read"),
    "no offsets": (file_of(text({"a": {"dtype": "F32", "shape": [2]}})), "(KeyError)"),
    "offsets of text": (file_of(text({"a": {**A, "data_offsets": ["0", "4"]}})), "(TypeError)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_whole_file_is_described(name, tmp_path):
    content, said = OTHER[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="Download it again") as refused:
        check_weight_file(path)
    assert said in str(refused.value) and '"model.safetensors"' in str(refused.value)


@pytest.mark.parametrize("kind", ["a link to nowhere", "a folder"])
def test_what_cannot_be_read_is_refused(kind, tmp_path):
    path = tmp_path / "model.safetensors"
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LoadError, match='"model.safetensors" must be a file that can be read, got'):
        check_weight_file(path)
