"""Keys and values of several sequences of different lengths in one buffer, rolled back row by row.

Every sequence starts at index 0 of its row and the rest of the row is never read, so rolling back,
at any width and with another count for every row, is arithmetic on Python integers. Nothing moves
before `keep`, so a forward that fails half way leaves no trace.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_targets.window import WindowCache

_STEP = 256  # buffers grow by this many positions


class RaggedCache:
    """Stands in for a KVCache or a WindowCache of B sequences during a batched forward.

    Args:
        keys: Shape (B, heads, capacity, hd).
        values: Same leading shape.
        used: Positions held per row; the last one is the newest token's.
        window: W of a sliding-window layer: a position sees itself and the W - 1 before it.
        slack: Positions beyond the window that its rows keep when they are moved.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        used: Sequence[int],
        window: int | None = None,
        slack: int = 128,
    ) -> None:
        self.keys, self.values = keys, values
        self.used = list(used)
        self.window = window
        self.slack = slack
        self.offset = mx.array(self.used, mx.int32)  # (B,), absolute; set by `prepare`
        self._columns = mx.array([], mx.int32)
        self._first = 0

    def prepare(self, n_new: int, offset: mx.array) -> None:
        """Make room for `n_new` positions per row; `offset` holds the absolute ones, (B,)."""
        self.offset = offset
        if self.window is not None and max(self.used) + n_new > self.keys.shape[2]:
            self._drop_oldest(self.window - 1 + self.slack)
        missing = max(self.used) + n_new - self.keys.shape[2]
        if missing > 0:
            room = (missing + _STEP - 1) // _STEP * _STEP
            self.keys, self.values = (_widened(a, room) for a in (self.keys, self.values))
        start = mx.array(self.used, mx.int32)
        self._columns = start[:, None] + mx.arange(n_new, dtype=mx.int32)  # (B, T)
        reach = 0 if self.window is None else min(self.used) - (self.window - 1)
        self._first = max(reach, 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (B, heads, T, hd) behind each row's own end; returns what attention may see."""
        at, end = self._columns, max(self.used) + keys.shape[2]
        if min(self.used) == max(self.used):
            self.keys[..., self.used[0] : end, :] = keys
            self.values[..., self.used[0] : end, :] = values
        else:
            index = at[:, None, :, None]
            self.keys = mx.put_along_axis(self.keys, index, keys, axis=2)
            self.values = mx.put_along_axis(self.values, index, values, axis=2)
        return self.keys[..., self._first : end, :], self.values[..., self._first : end, :]

    def make_mask(
        self, n_rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Which of the fetched positions each new row sees: (B, 1, T, fetched), bool."""
        rows = self._columns[:, None, :, None]
        seen = mx.arange(self._first, max(self.used) + n_rows)[None, None, None]
        mask = seen <= rows
        windows = [w for w in (window_size, self.window) if w is not None]
        return mask & (seen > rows - min(windows)) if windows else mask

    def keep(self, n_keep: Sequence[int]) -> None:
        """Of the newest rows keep the first `n_keep[b]` of row b."""
        self.used = [u + n for u, n in zip(self.used, n_keep, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        index = mx.array(list(rows), mx.int32)
        self.used = [self.used[row] for row in rows]
        end = max(self.used)
        self.keys, self.values = self.keys[index, :, :end], self.values[index, :, :end]

    def row(self, row: int, offset: int) -> KVCache | WindowCache:
        """A single cache that goes on with one row; `offset` is its absolute position."""
        end = self.used[row]
        keys, values = (mx.contiguous(a[row : row + 1, :, :end]) for a in (self.keys, self.values))
        if self.window is None:
            single = KVCache()
            single.keys, single.values, single.offset = keys, values, offset
            return single
        return WindowCache.holding(keys, values, offset, self.window, self.slack)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Arrays to evaluate."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes

    def _drop_oldest(self, n_most: int) -> None:
        """Move each row to the front so that it holds at most `n_most` positions."""
        held = [min(u, n_most) for u in self.used]
        start = mx.array([u - h for u, h in zip(self.used, held, strict=True)], mx.int32)
        index = (start[:, None] + mx.arange(max(held)))[:, None, :, None]
        index = mx.minimum(index, self.keys.shape[2] - 1)
        kept = [mx.take_along_axis(a, index, axis=2) for a in (self.keys, self.values)]
        room = self.keys.shape[2] - max(held)
        self.keys, self.values = (_widened(a, room) for a in kept)
        self.used = held


def joined(parts: Sequence[Any]) -> RaggedCache:
    """One ragged cache of single caches and ragged ones of the same layer, rows in order."""
    rows = [_as_ragged(part) for part in parts]
    used = [u for row in rows for u in row.used]
    capacity = (max(used) // _STEP + 1) * _STEP
    first = rows[0]
    if first.window is not None:
        capacity = max(capacity, first.window + 2 * first.slack)
    keys, values = (
        mx.concatenate([_fitted(getattr(row, name), capacity) for row in rows])
        for name in ("keys", "values")
    )
    return RaggedCache(keys, values, used, first.window, first.slack)


def can_join(entry: Any) -> bool:
    """True for the kinds of cache that this module knows."""
    return type(entry) in (KVCache, WindowCache)


def _as_ragged(entry: Any) -> RaggedCache:
    if isinstance(entry, RaggedCache):
        return entry
    keys, values = entry.keys, entry.values
    if isinstance(entry, WindowCache):
        return RaggedCache(keys, values, [entry.n_held], entry.window, entry.slack)
    return RaggedCache(keys, values, [entry.offset])


def _fitted(array: mx.array, capacity: int) -> mx.array:
    have = array.shape[2]
    return array[:, :, :capacity] if have >= capacity else _widened(array, capacity - have)


def _widened(array: mx.array, n_rows: int) -> mx.array:
    batch, heads, _, head_dim = array.shape
    if n_rows <= 0:
        return array
    return mx.concatenate([array, mx.zeros((batch, heads, n_rows, head_dim), array.dtype)], axis=2)
