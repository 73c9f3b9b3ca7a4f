"""Reads back the safetensors folders that this package writes, in pieces.

Independent of the code that wrote them: codes are taken out of the bit stream one by one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from spec_convert.errors import ConvertError, quote

Array = np.ndarray[Any, Any]
_DTYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "F64": "<f8",
    "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
_MAX_HEADER = 100_000_000


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
                f"[verify] {quote(str(folder))} must hold model*.safetensors, got none. "
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


def _read_header(file: IO[bytes], path: Path) -> Iterator[tuple[str, Stored]]:
    size = path.stat().st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
    if length > min(_MAX_HEADER, size - 8):
        raise ConvertError(
            f"[verify] {quote(str(path))} must be a safetensors file. Convert again."
        )
    header = json.loads(file.read(length))
    for name, row in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(row["shape"])
        begin, end = row["data_offsets"]
        wanted = prod(shape) * np.dtype(_DTYPES[row["dtype"]]).itemsize
        if end - begin != wanted or 8 + length + end > size:
            raise ConvertError(
                f"[verify] {quote(name)} must fill {wanted} bytes of {quote(path.name)}, "
                f"got {end - begin}. The folder is damaged: convert again."
            )
        yield name, Stored(file, row["dtype"], shape, 8 + length + begin)


def affine_values(words: Array, scales: Array, biases: Array) -> Array:
    """Values of affine rows: scale * code + bias, computed in float32.

    Args:
        words: packed codes, shape (n, K * bits / 32), uint32.
        scales: shape (n, groups).
        biases: same shape.

    Returns:
        Shape (n, K), float32.
    """
    n_rows, n_groups = scales.shape
    n_bits = words.shape[1] * 32 // (n_groups * 32)
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    digits = stream.reshape(n_rows, n_groups, 32, n_bits)
    codes = (digits << np.arange(n_bits, dtype=np.uint8)).sum(axis=3, dtype=np.uint8)
    values = codes * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    return values.reshape(n_rows, -1)
