import io
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from spec_convert.container import read_container
from spec_convert.errors import ConvertError


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, ne: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne) + struct.pack("<IQ", kind, offset)
    )


def header(
    tensors: list[bytes] = [],  # noqa: B006
    entries: list[bytes] = [],  # noqa: B006
    *,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    version: int = 3,
    data: int = 0,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_keys is None else n_keys,
    )
    start = b"GGUF" + struct.pack("<IQQ", version, *counts)
    whole = start + b"".join(entries) + b"".join(tensors)
    return whole + bytes(-len(whole) % 32) + bytes(data) if data else whole


def parse(data: bytes):
    return read_container(io.BytesIO(data), len(data))


def refusal(data: bytes) -> str:
    with pytest.raises(ConvertError) as caught:
        parse(data)
    message = str(caught.value)
    assert message.startswith("[") and "\n" not in message and message.isprintable()
    return message


def test_a_file_of_the_gguf_package_reads_the_same(make_llama):
    path: Path = make_llama(gguf.GGMLQuantizationType.Q4_1)
    reference = gguf.GGUFReader(path)
    with path.open("rb") as file:
        container = read_container(file, path.stat().st_size)
    assert container.version == 3
    assert [tensor.name for tensor in container.tensors] == [t.name for t in reference.tensors]
    for ours, theirs in zip(container.tensors, reference.tensors, strict=True):
        assert ours.kind == theirs.tensor_type
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert ours.offset == theirs.data_offset
        assert ours.n_bytes == theirs.n_bytes
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            value = container.metadata.values[key]
            ours = value.tolist() if isinstance(value, np.ndarray) else value
            assert ours == field.contents()


def test_every_value_type_is_read():
    values = {
        0: ("<B", 200), 1: ("<b", -5), 2: ("<H", 60000), 3: ("<h", -300), 4: ("<I", 4_000_000_000),
        5: ("<i", -7), 6: ("<f", 0.5), 10: ("<Q", 1 << 60), 11: ("<q", -(1 << 60)), 12: ("<d", 0.1),
    }  # fmt: skip
    entries = [entry(str(kind), kind, struct.pack(*value)) for kind, value in values.items()]
    entries.append(entry("yes", 7, b"\x02"))
    entries.append(entry("flags", 9, struct.pack("<IQ", 7, 2) + b"\x00\x01"))
    entries.append(entry("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("é")))
    metadata = parse(header(entries=entries)).metadata
    assert {int(k): v for k, v in metadata.values.items() if k.isdigit()} == {
        kind: value[1] for kind, value in values.items()
    }
    assert metadata.values["yes"] is True
    assert metadata.flags("flags") == [False, True]
    assert metadata.texts("words") == ["a", "é"]


def test_a_file_cut_anywhere_is_refused(make_llama):
    path: Path = make_llama()
    data = path.read_bytes()
    last = gguf.GGUFReader(path).tensors[-1]
    end = int(last.data_offset + last.n_bytes)
    for size in [*range(0, end, 64), end - 1]:
        refusal(data[:size])
    parse(data[:end])


@pytest.mark.parametrize(
    ("data", "meaning"),
    [
        (b"", "an empty file"),
        (bytes(130), "zero bytes"),
        (b"<!DOCTYPE html><html>" + bytes(100), "a web page"),
        (b"\n  <html>" + bytes(100), "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (b'{"error":"Repository not found"}', "JSON"),
        (b"PK\x03\x04" + bytes(40), "a zip archive"),
        (b"\x5b\xa4\x08u" + bytes(40), "bytes 5b a4 08 75: download it again"),
        (b"ggjt" + bytes(40), "older GGJT"),
        (struct.pack("<Q", 40) + b'{"a":{}}', "a safetensors file"),
        (b"GGML" + bytes(40), "bytes 47 47 4d 4c: download it again"),
    ],
)
def test_a_file_of_another_kind_is_named(data, meaning):
    assert meaning in refusal(data)


def test_a_big_endian_file_is_named():
    assert "big-endian" in refusal(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_other_container_versions_are_refused():
    assert "must be 2 or 3, got 1" in refusal(header(version=1))
    assert parse(header(version=2)).version == 2


@pytest.mark.parametrize("count", [1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_count_larger_than_the_file_is_refused_without_allocating(count):
    assert "number of tensors" in refusal(header(n_tensors=count))
    assert "number of metadata entries" in refusal(header(n_keys=count))
    array = entry("a", 9, struct.pack("<IQ", 4, count))
    assert 'number of elements of "a"' in refusal(header(entries=[array]))
    words = entry("a", 9, struct.pack("<IQ", 8, count))
    assert 'number of elements of "a"' in refusal(header(entries=[words]))
    string = entry("a", 8, struct.pack("<Q", count))
    assert 'the value of "a"' in refusal(header(entries=[string]))


def test_a_tensor_of_two_to_the_sixty_elements_is_refused():
    assert "needs bytes" in refusal(header([tensor("w", [1 << 30, 1 << 30])], data=64))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([tensor("w", [8], offset=32)], 'Tensor "w" needs bytes'),
        ([tensor("w", [8], offset=1)], "must be a multiple of 32, got 1"),
        ([tensor("w", [8], offset=(1 << 64) - 32)], 'Tensor "w" needs bytes'),
        ([tensor("w", [8], kind=142)], "storage type 142"),
        ([tensor("w", [8], kind=4)], "storage type 4"),
        ([tensor("w", [8], kind=2)], "a multiple of 32 values for Q4_0, got 8"),
        ([tensor("w", [4]), tensor("w", [4])], '"w" twice'),
        ([tensor("v", [4]), tensor("w", [4])], 'must not overlap, got "v" and "w"'),
        ([tensor("w", [])], "1 to 4 axes, got 0"),
        ([tensor("w", [1, 1, 1, 1, 1])], "1 to 4 axes, got 5"),
        ([tensor("w", [8, 0])], "must be at least 1, got [8, 0]"),
        ([tensor("w" * 2000, [8])], "at most 1024 bytes"),
        ([text(b"\xff\xfe") + bytes(40)], "must be UTF-8"),
    ],
)
def test_a_wrong_tensor_table_is_refused(tensors, words):
    assert words in refusal(header(tensors, data=32))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("a", 4, bytes(4)), entry("a", 4, bytes(4))], '"a" twice'),
        ([entry("a", 13, bytes(8))], "value type of 0 to 12, got 13"),
        ([entry("a", 9, struct.pack("<IQ", 9, 1) + bytes(12))], "element type 9"),
        ([entry("a", 8, text(b"\xc3\x28"))], 'the value of "a" must be UTF-8'),
        ([entry("general.alignment", 4, struct.pack("<I", 0))], "a power of two up to"),
        ([entry("general.alignment", 4, struct.pack("<I", 24))], "got 24"),
        ([entry("general.alignment", 8, text("32"))], "must be a whole number"),
        ([entry("a\nb\x1b[31m", 13, bytes(8))], r'"a\nb\x1b[31m"'),
    ],
)
def test_wrong_metadata_is_refused(entries, words):
    assert words in refusal(header(entries=entries))


def test_alignment_moves_the_data_section():
    alignment = entry("general.alignment", 4, struct.pack("<I", 128))
    data = header([tensor("w", [8])], [alignment])
    container = parse(data + bytes(-len(data) % 128 + 32))
    assert container.tensors[0].offset == container.data_offset == 128
