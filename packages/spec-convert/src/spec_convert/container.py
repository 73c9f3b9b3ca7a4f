"""The GGUF container: header, metadata and tensor table, read with every length checked first.

Nothing is allocated before the bytes behind it are known to exist, so a false count costs an
error message and no memory. Knows nothing about models, names or quantised values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import IO, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_convert.errors import ConvertError, quote
from spec_convert.metadata import Metadata, Value

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 1 << 30
_MAX_ARRAY = 1 << 24
_MAX_NAME_BYTES = 1024
_MAX_TENSORS = 1 << 20
_MAX_KEYS = 1 << 16
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_KINDS = frozenset(int(kind) for kind in GGMLQuantizationType)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMERIC = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

_LOOKALIKES = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"<", "a web page or XML: the download returned an error page"),
    (b"{", "JSON: the download returned a message, or it is a config file"),
    (b"PK\x03\x04", "a zip archive (a wheel or a PyTorch checkpoint)"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"ggml", "a file of the older GGML format"),
    (b"ggjt", "a file of the older GGJT format"),
    (b"ggla", "a LoRA file of the older GGLA format"),
)


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table.

    Attributes:
        name: GGUF tensor name.
        kind: GGUF storage type.
        shape: row-major shape, slowest axis first (the reverse of the stored `ne`).
        offset: absolute position of the first byte in the file.
        n_bytes: length of the data.
        part: file it is in, counted from 0, where a model is split.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    part: int = 0

    @property
    def n_rows(self) -> int:
        """Product of all axes but the last."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; rows are stored back to back."""
        return self.n_bytes // self.n_rows

    def with_rows(self) -> TensorInfo:
        """The same data, a vector seen as a column, so that its values can move like rows."""
        if len(self.shape) > 1 or GGML_QUANT_SIZES[self.kind][0] > 1:
            return self
        return replace(self, shape=(*self.shape, 1))


@dataclass(frozen=True)
class Container:
    """Everything a GGUF file says about itself.

    Attributes:
        version: container version, 2 or 3.
        alignment: tensor data starts at multiples of this many bytes.
        metadata: key-value section.
        tensors: tensor table, in file order.
        data_offset: absolute position of the data section.
        n_bytes: size of the file.
    """

    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    n_bytes: int


def read_container(file: IO[bytes], n_bytes: int) -> Container:
    """Parse and check the header of a GGUF file.

    Args:
        file: binary stream at position 0.
        n_bytes: total size of the stream.

    Returns:
        The header; every tensor lies inside the file and overlaps no other.

    Raises:
        ConvertError: the stream is no GGUF file, is cut short, or contradicts itself.
    """
    cursor = _Cursor(file, n_bytes)
    version = _read_preamble(cursor)
    n_tensors, n_keys = cursor.unpack("<QQ", "the counts")
    _check_count("tensors", n_tensors, min(_MAX_TENSORS, cursor.left // _MIN_TENSOR_BYTES))
    _check_count("metadata entries", n_keys, min(_MAX_KEYS, cursor.left // _MIN_KEY_BYTES))
    metadata = Metadata(_read_metadata(cursor, n_keys))
    alignment = _alignment(metadata)
    raw = [_read_tensor(cursor, index) for index in range(n_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(_place(entry, data_offset, alignment, n_bytes) for entry in raw)
    check_names(tensors)
    _check_overlap(tensors)
    return Container(version, alignment, metadata, tensors, data_offset, n_bytes)


class _Cursor:
    """Reads forward; refuses to ask for bytes that the file does not have."""

    def __init__(self, file: IO[bytes], n_bytes: int) -> None:
        self._file = file
        self._end = min(n_bytes, _MAX_HEADER_BYTES)
        self.n_bytes = n_bytes
        self.position = 0

    @property
    def left(self) -> int:
        return self._end - self.position

    def take(self, count: int, what: str) -> bytes:
        data = self._file.read(count) if count <= self.left else b""
        if len(data) != count:
            raise ConvertError(
                f"[gguf] The file must hold {count} bytes for {what} at position {self.position}, "
                f"got {max(0, self.n_bytes - self.position)}. It is cut short or damaged: "
                "download it again."
            )
        self.position += count
        return data

    def peek(self, count: int) -> bytes:
        data = self._file.read(count)
        self._file.seek(self.position)
        return data

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def text(self, what: str, limit: int) -> str:
        (count,) = self.unpack("<Q", what)
        if count > limit:
            raise ConvertError(
                f"[gguf] {what} must be at most {limit} bytes long, got {count}. "
                "The file is damaged: download it again."
            )
        data = self.take(count, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConvertError(
                f"[gguf] {what} must be UTF-8 text, got other bytes. "
                "The file is damaged or was written by a broken converter."
            ) from error


def _read_preamble(cursor: _Cursor) -> int:
    start = cursor.peek(24)
    if start[:4] != MAGIC:
        raise ConvertError(f"[gguf] The file must start with GGUF, got {_lookalike(start)}.")
    if len(start) < 24:
        raise ConvertError(
            f"[gguf] A header has at least 24 bytes, got {len(start)}. "
            "The file is cut short: download it again."
        )
    cursor.take(8, "the header")
    (version,) = struct.unpack("<I", start[4:8])
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise ConvertError(
                "[gguf] The file must be little-endian, got a big-endian file. "
                "Convert it with the `gguf` package's gguf-convert-endian."
            )
        raise ConvertError(f"[gguf] The container version must be 2 or 3, got {version}.")
    return version


def _lookalike(start: bytes) -> str:
    if not start:
        return "an empty file: download it again"
    for prefix, meaning in _LOOKALIKES:
        if start.lstrip().startswith(prefix):
            return meaning
    if not any(start):
        return "zero bytes: the download was reserved on disk but never written"
    if len(start) >= 9 and start[8:9] == b"{":
        return "a safetensors file, which needs no conversion"
    return f"bytes {start[:4].hex(' ')}: download it again, or name another file"


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ConvertError(
            f"[gguf] The number of {what} must be at most {limit} in a file of this size, "
            f"got {count}. The file is damaged: download it again."
        )


def _read_metadata(cursor: _Cursor, n_keys: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for index in range(n_keys):
        key = cursor.text(f"metadata key {index}", _MAX_NAME_BYTES)
        if key in values:
            raise ConvertError(f"[gguf] Metadata keys must be unique, got {quote(key)} twice.")
        (kind,) = cursor.unpack("<I", f"the type of {quote(key)}")
        values[key] = _read_value(cursor, key, kind)
    return values


def _read_value(cursor: _Cursor, key: str, kind: int) -> Value:
    what = f"the value of {quote(key)}"
    if kind == _STRING:
        return cursor.text(what, _MAX_HEADER_BYTES)
    if kind in _NUMERIC:
        return _numbers(cursor.take(np.dtype(_NUMERIC[kind]).itemsize, what), kind)[0].item()
    if kind == _ARRAY:
        return _read_array(cursor, key, what)
    raise ConvertError(f"[gguf] {quote(key)} must have a value type of 0 to 12, got {kind}.")


def _read_array(cursor: _Cursor, key: str, what: str) -> Value:
    kind, count = cursor.unpack("<IQ", what)
    if kind != _STRING and kind not in _NUMERIC:
        raise ConvertError(
            f"[gguf] The array {quote(key)} must hold numbers or strings, got element type {kind}."
        )
    width = 8 if kind == _STRING else np.dtype(_NUMERIC[kind]).itemsize
    _check_count(f"elements of {quote(key)}", count, min(_MAX_ARRAY, cursor.left // width))
    if kind == _STRING:
        return [cursor.text(what, _MAX_HEADER_BYTES) for _ in range(count)]
    return _numbers(cursor.take(count * width, what), kind)


def _numbers(data: bytes, kind: int) -> np.ndarray[Any, Any]:
    values = np.frombuffer(data, np.dtype(_NUMERIC[kind]))
    return values != 0 if kind == _BOOL else values


def _alignment(metadata: Metadata) -> int:
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ConvertError(
            '[gguf] "general.alignment" must be a power of two up to 1048576, '
            f"got {alignment}. The file is damaged: download it again."
        )
    return alignment


@dataclass(frozen=True)
class _Entry:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int


def _read_tensor(cursor: _Cursor, index: int) -> _Entry:
    name = cursor.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
    (n_dims,) = cursor.unpack("<I", f"tensor {quote(name)}")
    if not 1 <= n_dims <= 4:
        raise ConvertError(f"[gguf] Tensor {quote(name)} must have 1 to 4 axes, got {n_dims}.")
    ne = cursor.unpack(f"<{n_dims}Q", f"the shape of {quote(name)}")
    kind, offset = cursor.unpack("<IQ", f"tensor {quote(name)}")
    if min(ne) < 1:
        raise ConvertError(f"[gguf] Axes of {quote(name)} must be at least 1, got {list(ne)}.")
    if kind not in _KINDS:
        raise ConvertError(
            f"[gguf] Tensor {quote(name)} has storage type {kind}, which is not a type of "
            "upstream GGUF. Use a file in a standard type such as Q4_1, Q8_0 or BF16."
        )
    return _Entry(name, GGMLQuantizationType(kind), tuple(reversed(ne)), offset)


def _place(entry: _Entry, data_offset: int, alignment: int, n_bytes: int) -> TensorInfo:
    block, block_bytes = GGML_QUANT_SIZES[entry.kind]
    if entry.shape[-1] % block:
        raise ConvertError(
            f"[gguf] Rows of {quote(entry.name)} must be a multiple of {block} values for "
            f"{entry.kind.name}, got {entry.shape[-1]}."
        )
    size = prod(entry.shape) // block * block_bytes
    start = data_offset + entry.offset
    if entry.offset % alignment:
        raise ConvertError(
            f"[gguf] The offset of {quote(entry.name)} must be a multiple of {alignment}, "
            f"got {entry.offset}. The file is damaged: download it again."
        )
    if start + size > n_bytes:
        raise ConvertError(
            f"[gguf] Tensor {quote(entry.name)} needs bytes {start} to {start + size}, got a file "
            f"of {n_bytes} bytes. It is cut short or damaged: download it again."
        )
    return TensorInfo(entry.name, entry.kind, entry.shape, start, size)


def check_names(tensors: Iterable[TensorInfo]) -> None:
    """Refuse a tensor name that occurs twice.

    Raises:
        ConvertError: with the name.
    """
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ConvertError(
                f"[gguf] Tensor names must be unique, got {quote(tensor.name)} twice."
            )
        seen.add(tensor.name)


def _check_overlap(tensors: tuple[TensorInfo, ...]) -> None:
    in_order = sorted(tensors, key=lambda tensor: tensor.offset)
    for first, second in zip(in_order, in_order[1:], strict=False):
        if first.offset + first.n_bytes > second.offset:
            raise ConvertError(
                f"[gguf] Tensors must not overlap, got {quote(first.name)} and "
                f"{quote(second.name)}. The file is damaged: download it again."
            )
