"""Frozen states of a sequence, from which other sequences can go on: what a prefix cache keeps.

A frozen state holds rows up to some length N. Entries whose rows are positions can go on from any
shorter length as well; a sliding window only where its last W - 1 rows are still held. Freezing
copies what is in use, so the live cache and the frozen one never share a buffer that is written to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_targets.window import WindowCache


@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """One cache entry.

    Attributes:
        keys: Shape (1, heads, n, hd): the newest n rows in temporal order.
        values: Same leading shape.
        offset: Absolute position of the next row, N.
        window: W of a sliding window, or None.
        slack: Of a window.
    """

    keys: mx.array
    values: mx.array
    offset: int
    window: int | None = None
    slack: int = 0

    def reach(self, n: int) -> int:
        """The greatest length up to `n` that this entry can go on from."""
        n = min(n, self.offset)
        first = self.offset - self.keys.shape[2]  # absolute position of the oldest row
        if self.window is None or first == 0 or n - (self.window - 1) >= first:
            return n
        return 0

    def thaw(self, n: int) -> KVCache | WindowCache:
        """A live entry that goes on from length `n`, which `reach` allows."""
        end = self.keys.shape[2] - (self.offset - n)
        keys, values = (mx.contiguous(a[:, :, :end]) for a in (self.keys, self.values))
        if self.window is not None:
            return WindowCache.holding(keys, values, n, self.window, self.slack)
        entry = KVCache()
        entry.keys, entry.values, entry.offset = keys, values, n
        return entry


@dataclass(frozen=True, slots=True)
class FrozenCache:
    """A sequence's state at length `offset`."""

    entries: tuple[FrozenEntry, ...]
    offset: int

    def reach(self, n: int) -> int:
        """The greatest length up to `n` that all entries can go on from; 0 is always possible."""
        reached = min([n, self.offset, *(entry.reach(n) for entry in self.entries)])
        return reached if all(e.reach(reached) == reached for e in self.entries) else 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.keys.nbytes + entry.values.nbytes for entry in self.entries)

    def arrays(self) -> dict[str, mx.array]:
        """All arrays by name, for writing them to a file."""
        named: dict[str, mx.array] = {}
        for i, entry in enumerate(self.entries):
            named[f"{i}.keys"], named[f"{i}.values"] = entry.keys, entry.values
        return named

    def layout(self) -> list[dict[str, Any]]:
        """Everything but the arrays, as JSON values."""
        return [{"offset": e.offset, "window": e.window, "slack": e.slack} for e in self.entries]


def rebuilt(
    arrays: dict[str, mx.array], layout: Sequence[dict[str, Any]], offset: int
) -> FrozenCache:
    """The frozen cache that `arrays` and `layout` were taken from.

    Raises:
        KeyError: an array or a field is missing.
    """
    entries = [
        FrozenEntry(
            arrays[f"{i}.keys"], arrays[f"{i}.values"], e["offset"], e["window"], e["slack"]
        )
        for i, e in enumerate(layout)
    ]
    return FrozenCache(tuple(entries), offset)


def freeze_entry(entry: Any) -> FrozenEntry | None:
    """A frozen copy of a live entry; None for a kind that cannot be frozen, or an empty one."""
    if type(entry) is KVCache and entry.keys is not None:
        keys, values = entry.keys, entry.values
        rows = slice(0, entry.offset)
        return FrozenEntry(_copy(keys, rows), _copy(values, rows), entry.offset)
    if type(entry) is WindowCache and entry.keys is not None and entry.values is not None:
        rows = slice(0, entry.n_held)
        return FrozenEntry(
            _copy(entry.keys, rows),
            _copy(entry.values, rows),
            entry.offset,
            entry.window,
            entry.slack,
        )
    return None


def _copy(array: Any, rows: slice) -> mx.array:
    return mx.contiguous(array[:, :, rows])
