"""Reads back the safetensors folders that this package writes, in pieces.

Independent of the code that wrote them: codes are taken out of the bit stream one by one.
"""

from __future__ import annotations

import json
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from spec_convert.errors import ConvertError, quote, quote_path

Array = np.ndarray[Any, Any]
_DTYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "F64": "<f8",
    "I8": "<i1", "U8": "<u1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
_MAX_HEADER = 100_000_000
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32) / 2
_E2M1 = np.concatenate([_E2M1, -_E2M1])


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file.

    Attributes:
        file: the open file.
        tag: safetensors dtype.
        shape: its shape.
        offset: absolute position of its data.
    """

    file: IO[bytes]
    tag: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop`, all axes but the last counted as rows; shape (n, K)."""
        width = self.shape[-1] if self.shape else 1
        dtype = np.dtype(_DTYPES[self.tag])
        self.file.seek(self.offset + start * width * dtype.itemsize)
        data = self.file.read((stop - start) * width * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(stop - start, width)


class TensorFolder:
    """Every tensor of a folder's `model*.safetensors`; a context manager.

    Args:
        folder: the output of a conversion.

    Raises:
        ConvertError: the folder has no such files, or one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("model*.safetensors"))
        if not paths:
            raise ConvertError(
                f"[verify] {quote_path(folder)} must hold model*.safetensors, got none. "
                "Name the folder that spec-convert wrote."
            )
        self.tensors: dict[str, Stored] = {}
        with ExitStack() as stack:
            for path in paths:
                file = stack.enter_context(path.open("rb"))
                self.tensors.update(_read_header(file, path))
            self._stack = stack.pop_all()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _read_header(file: IO[bytes], path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
    refusal = ConvertError(
        f"[verify] {quote_path(path)} must be a safetensors file. Convert again."
    )
    if length > min(_MAX_HEADER, size - 8):
        raise refusal
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: _stored(name, row, file, path, 8 + length, size) for name, row in header.items()
        }
    except ConvertError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise refusal from None


def _stored(
    name: str, row: dict[str, Any], file: IO[bytes], path: Path, data: int, size: int
) -> Stored:
    """A tensor by its row of the header; `data` is where the file's data begin."""
    shape = tuple(row["shape"])
    begin, end = row["data_offsets"]
    wanted = prod(shape) * np.dtype(_DTYPES[row["dtype"]]).itemsize
    held = max(0, min(end, size - data) - begin)
    if not begin + held == end == begin + wanted:
        raise ConvertError(
            f"[verify] {quote(name)} must fill {wanted} bytes of {quote(path.name)}, "
            f"got {held}. The folder is damaged: convert again."
        )
    return Stored(file, row["dtype"], shape, data + begin)


def affine_values(words: Array, scales: Array, biases: Array, group: int) -> Array:
    """Values of affine rows: scale * code + bias, computed in float32.

    Args:
        words: packed codes, shape (n, K * bits / 32), uint32.
        scales: shape (n, groups).
        biases: same shape.
        group: values that share a scale.

    Returns:
        Shape (n, K), float32.
    """
    codes = _codes(words, scales.shape, group)
    values = codes * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    return values.reshape(len(words), -1)


def block_float_values(words: Array, scales: Array, group: int) -> Array:
    """Values of block floating-point rows: e2m1 codes times a shared scale.

    Args:
        words: packed codes, shape (n, K / 8), uint32.
        scales: shape (n, groups), uint8: e8m0 for groups of 32, e4m3 for groups of 16.
        group: values that share a scale.

    Returns:
        Shape (n, K), float32.
    """
    if group == 32:
        factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    else:
        exponent, mantissa = (scales >> 3).astype(np.int32), (scales & 7).astype(np.float32)
        normal = np.ldexp(1 + mantissa / 8, exponent - 7)
        factors = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    with np.errstate(over="ignore"):
        values = _E2M1[_codes(words, scales.shape, group)] * factors[..., None]
    return values.reshape(len(words), -1)


def _codes(words: Array, shape: tuple[int, ...], group: int) -> Array:
    n_rows, n_groups = shape
    n_bits = words.shape[1] * 32 // (n_groups * group)
    data = np.ascontiguousarray(words).view(np.uint8)
    if n_bits in (2, 4, 8):
        places = np.arange(0, 8, n_bits, dtype=np.uint8)
        fields = (data[:, :, None] >> places) & np.uint8((1 << n_bits) - 1)
        return fields.reshape(n_rows, n_groups, group)
    stream = np.unpackbits(data, axis=1, bitorder="little")
    digits = stream.reshape(n_rows, n_groups, group, n_bits)
    return (digits << np.arange(n_bits, dtype=np.uint8)).sum(axis=3, dtype=np.uint8)
