"""Moves one tensor from the source to the output in chunks of whole rows.

Applies row orders, value shifts and storage types; measures what rounding cost. Knows nothing
about names or folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spec_convert.container import TensorInfo
from spec_convert.floats import PLAIN, FloatType, decode, encode, to_float32
from spec_convert.names import Slot
from spec_convert.plan import PackedStorage, Planned
from spec_convert.repack import Packed, repack
from spec_convert.source import Source
from spec_convert.tensorfile import affine_values

Array = np.ndarray[Any, Any]
_CHUNK_BYTES = 4 << 20


@dataclass
class ErrorMeter:
    """Running difference between the source's values and the stored ones."""

    largest: float = 0.0
    _squares: float = 0.0
    _count: int = 0

    def add(self, wanted: Array, got: Array) -> None:
        """Compare two float arrays of one shape; equal infinities and NaNs count as equal."""
        self._count += wanted.size
        if np.array_equal(wanted, got, equal_nan=True):
            return
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - wanted)
        error[(wanted == got) | (np.isnan(wanted) & np.isnan(got))] = 0
        self.largest = max(self.largest, float(error.max()))
        self._squares += float(np.square(error).sum())

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0


@dataclass(frozen=True)
class Piece:
    """Consecutive rows in their final form.

    Attributes:
        arrays: data for each entry of the planned tensor, in the same order.
        n_bytes_read: source bytes they came from.
    """

    arrays: tuple[Array, ...]
    n_bytes_read: int


def pieces(source: Source, planned: Planned, meter: ErrorMeter) -> Iterator[Piece]:
    """Read, reorder and store one tensor, a few megabytes at a time.

    Args:
        source: the open file.
        planned: the tensor and its storage.
        meter: collects the rounding error of floating-point storage.

    Yields:
        Pieces in row order.

    Raises:
        ScaleOverflowError: scales need float32.
        ConvertError: values do not fit, or the file changed.
    """
    info = by_rows(planned.info)
    for start, stop in row_ranges(info, planned.slot):
        raw = source_rows(source, info, planned.slot, start, stop)
        yield Piece(_store(raw, planned, meter), raw.nbytes)


def row_ranges(info: TensorInfo, slot: Slot) -> Iterator[tuple[int, int]]:
    """Bounds of chunks that fit in memory and never cut a head in two."""
    unit = info.n_rows // slot.interleaved_heads if slot.interleaved_heads else 1
    step = max(1, _CHUNK_BYTES // (info.row_bytes * unit)) * unit
    for start in range(0, info.n_rows, step):
        yield start, min(start + step, info.n_rows)


def source_rows(source: Source, info: TensorInfo, slot: Slot, start: int, stop: int) -> Array:
    """Raw rows in the order of the output.

    Args:
        source: the open file.
        info: the tensor, seen as rows.
        slot: its row order.
        start: first row, at a head boundary where heads matter.
        stop: one past the last row.

    Returns:
        Shape (stop - start, row bytes), uint8.
    """
    raw = source.rows(info, start, stop)
    if not slot.interleaved_heads:
        return raw
    head = info.n_rows // slot.interleaved_heads
    pairs = raw.reshape(-1, head // 2, 2, raw.shape[-1])
    return pairs.swapaxes(1, 2).reshape(raw.shape)


def by_rows(info: TensorInfo) -> TensorInfo:
    """A vector of plain numbers as a column, so that its values can be reordered like rows."""
    if len(info.shape) > 1 or info.kind not in PLAIN:
        return info
    return replace(info, shape=(*info.shape, 1))


def _store(raw: Array, planned: Planned, meter: ErrorMeter) -> tuple[Array, ...]:
    kind, storage = planned.info.kind, planned.storage
    if isinstance(storage, PackedStorage):
        packed = repack(raw, kind, storage.scale_dtype, loose=storage.loose)
        if not storage.exact:
            _measure(raw, packed, planned, meter)
        parts = (packed.codes, packed.scales, packed.biases)
        return tuple(part for part in parts if part is not None)
    if PLAIN.get(kind) is storage and not planned.slot.shift:
        return (raw,)
    return (_store_floats(to_float32(raw, kind), planned.slot, storage, meter),)


def _measure(raw: Array, packed: Packed, planned: Planned, meter: ErrorMeter) -> None:
    assert packed.biases is not None and isinstance(planned.storage, PackedStorage)
    group = planned.storage.layout.group
    words = np.ascontiguousarray(packed.codes).view("<u4")
    values = affine_values(words, packed.scales, packed.biases, group)
    meter.add(to_float32(raw, planned.info.kind), values)


def _store_floats(values: Array, slot: Slot, storage: FloatType, meter: ErrorMeter) -> Array:
    shifted = values + np.float32(slot.shift) if slot.shift else values
    stored = encode(shifted, storage)
    back = decode(stored, storage)
    meter.add(values, back - np.float32(slot.shift) if slot.shift else back)
    return stored
