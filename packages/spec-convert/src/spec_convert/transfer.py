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
from gguf import GGMLQuantizationType as Kind

from spec_convert.container import TensorInfo
from spec_convert.floats import PLAIN, FloatType, decode, encode, to_float32, to_integers
from spec_convert.names import Change, Slot
from spec_convert.orders import Order, Tiled
from spec_convert.plan import IntegerStorage, PackedStorage, Planned
from spec_convert.repack import Packed, repack
from spec_convert.source import Source
from spec_convert.tensorfile import affine_values

Array = np.ndarray[Any, Any]
# Large enough to make little of what a call into numpy or the system costs, small enough for the
# temporaries of a chunk to stay in a processor's outer cache.
_CHUNK_BYTES = 1 << 20


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


class Rows:
    """A tensor's raw rows in the order of the output, a few megabytes at a time.

    Attributes:
        info: the tensor, seen as rows.
        n_rows: rows in the output.

    Args:
        source: the open file.
        info: the tensor.
        slot: its row order.
    """

    def __init__(self, source: Source, info: TensorInfo, slot: Slot) -> None:
        self.info = info.with_rows() if slot.rows is not None else info
        self._source = source
        self._order = slot.rows.indices(self.info.n_rows) if slot.rows is not None else None
        self.n_rows = self.info.n_rows if self._order is None else len(self._order)

    def chunks(self) -> Iterator[tuple[int, int, Array]]:
        """Bounds and raw rows, shape (stop - start, row bytes), uint8."""
        step = max(1, _CHUNK_BYTES // self.info.row_bytes)
        whole = None
        if self._order is not None:
            whole = self._source.rows(self.info, 0, self.info.n_rows)
        for start in range(0, self.n_rows, step):
            stop = min(start + step, self.n_rows)
            if whole is None or self._order is None:
                yield start, stop, self._source.rows(self.info, start, stop)
            else:
                yield start, stop, whole[self._order[start:stop]]


def reorder_columns(array: Array, order: Order | None) -> Array:
    """Columns of a chunk in the order of the output; blocks of columns move together.

    Args:
        array: shape (n, K) or any array whose rows hold the K values in order, such as codes.
        order: the source's order of all columns, or None.

    Returns:
        Same shape.
    """
    if not isinstance(order, Tiled):
        return array
    n_blocks = order.key_heads * order.per_key
    blocks = array.reshape(len(array), n_blocks, -1)
    return blocks[:, replace(order, width=1).indices(n_blocks)].reshape(array.shape)


def changed(values: Array, change: Change) -> Array:
    """What the output should hold for float32 values of the source, in float64."""
    if change is Change.MINUS_ONE:
        return values.astype(np.float64) - 1
    if change is Change.LOG_OF_NEGATIVE:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(-values.astype(np.float64))
    return values


def pieces(source: Source, planned: Planned, meter: ErrorMeter) -> Iterator[Piece]:
    """Read, reorder and store one tensor.

    Args:
        source: the open file.
        planned: the tensor and its storage.
        meter: collects rounding errors.

    Yields:
        Pieces in row order.

    Raises:
        ScaleOverflowError: scales need float32.
        ConvertError: values do not fit, or the file changed.
    """
    for start, _, raw in Rows(source, planned.info, planned.slot).chunks():
        arrays = _store(raw, start, planned, meter)
        ordered = tuple(reorder_columns(array, planned.slot.columns) for array in arrays)
        yield Piece(ordered, raw.nbytes)


def _store(raw: Array, start: int, planned: Planned, meter: ErrorMeter) -> tuple[Array, ...]:
    kind, storage, change = planned.info.kind, planned.storage, planned.slot.change
    if isinstance(storage, PackedStorage):
        packed = repack(raw, kind, storage.scale_dtype, loose=storage.loose)
        if not storage.exact:
            _measure(raw, packed, planned, meter)
        parts = (packed.codes, packed.scales, packed.biases)
        return tuple(part for part in parts if part is not None)
    if isinstance(storage, IntegerStorage):
        return (_integers(raw, start, kind, change),)
    if PLAIN.get(kind) is storage and change is Change.NONE:
        return (raw.view(storage.dtype),)
    return (_store_floats(to_float32(raw, kind), change, storage, meter),)


def _integers(raw: Array, start: int, kind: Kind, change: Change) -> Array:
    if change is not Change.IDS_TO_OFFSETS:
        return raw
    ids = to_integers(raw, kind).reshape(-1)
    return ids - np.arange(start, start + len(ids))


def _measure(raw: Array, packed: Packed, planned: Planned, meter: ErrorMeter) -> None:
    assert packed.biases is not None and isinstance(planned.storage, PackedStorage)
    group = planned.storage.layout.group
    words = np.ascontiguousarray(packed.codes).view("<u4")
    values = affine_values(words, packed.scales, packed.biases, group)
    meter.add(to_float32(raw, planned.info.kind), values)


def _store_floats(values: Array, change: Change, storage: FloatType, meter: ErrorMeter) -> Array:
    wanted = changed(values, change)
    with np.errstate(over="ignore"):
        stored = encode(wanted.astype(np.float32), storage)
    back = decode(stored, storage)
    if change is Change.MINUS_ONE:
        meter.add(values, back + np.float32(1))
    elif change is Change.LOG_OF_NEGATIVE:
        meter.add(values, -np.exp(back.astype(np.float64)).astype(np.float32))
    else:
        meter.add(values, back)
    return stored
