"""Caches of several sequences of different lengths in one buffer, rolled back row by row.

Keys and values: every sequence starts at index 0 of its row and the rest of the row is never read,
so rolling back, with another count for every row, is arithmetic on Python integers. Nothing moves
before `keep`, so a forward that fails half way leaves no trace. Recurrent state: the rows' states
side by side; rows that keep fewer positions take the state after those.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from spec_kernels import KernelError
from spec_targets.recurrent import RecurrentCache
from spec_targets.window import WindowCache

_STEP = 256  # buffers grow by this many positions


class Places:
    """Where a forward's new positions go; made once and shared by all layers.

    Args:
        n_new: Positions per row.
        offsets: Absolute position of the first one, per row.
        whole: Attention reads whole buffers and is told how full each row's are: it needs no mask.
    """

    def __init__(self, n_new: int, offsets: Sequence[int], *, whole: bool = False) -> None:
        self.n_new = n_new
        self.offset = mx.array(list(offsets), mx.int32)  # (B,)
        self.whole = whole
        self._columns: dict[tuple[int, ...], mx.array] = {}
        self._ends: dict[tuple[int, ...], mx.array] = {}

    def columns(self, used: Sequence[int]) -> mx.array:
        """Buffer columns behind `used` positions of each row: (B, T), int32."""
        key = tuple(used)
        if key not in self._columns:
            start = mx.array(key, mx.int32)
            self._columns[key] = start[:, None] + mx.arange(self.n_new, dtype=mx.int32)
        return self._columns[key]

    def ends(self, used: Sequence[int]) -> mx.array:
        """Positions that each row holds once the new ones are in: (B,), int32."""
        key = tuple(used)
        if key not in self._ends:
            self._ends[key] = mx.array([n + self.n_new for n in key], mx.int32)
        return self._ends[key]


class BatchEntry(Protocol):
    """One cache entry of B sequences."""

    def prepare(self, places: Places) -> None:
        """Make ready for new positions."""
        ...

    def undo(self) -> None:
        """A forward broke off: be as before `prepare`, whether or not that was reached."""
        ...

    def keep(self, n_rows: int, n_keep: Sequence[int]) -> None:
        """Of the newest `n_rows` positions keep the first `n_keep[b]` of row b."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        ...

    def row(self, row: int, offset: int) -> Any:
        """A single cache entry that goes on with one row; `offset` is its absolute position."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...


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
        buffers: Sequence[mx.array],
        used: Sequence[int],
        window: int | None = None,
        slack: int = 128,
    ) -> None:
        self.buffers = list(buffers)  # keys then values, halves of equal length
        self.used = list(used)
        self.window = window
        self.slack = slack
        self.offset = mx.array(self.used, mx.int32)  # (B,), absolute; set by `prepare`
        self._columns = mx.array([], mx.int32)
        self._first = self._end = 0
        self._ends: mx.array | None = None
        self.unread = False  # whole buffers look full to whoever does not ask for `n_keys`

    def prepare(self, places: Places) -> None:
        """Make room for new positions."""
        self.offset, n_new = places.offset, places.n_new
        if self.window is not None and max(self.used) + n_new > self.capacity:
            self._drop_oldest(self.window - 1 + self.slack)
        missing = max(self.used) + n_new - self.capacity
        if missing > 0:
            room = (missing + _STEP - 1) // _STEP * _STEP
            self.buffers = [_widened(a, room) for a in self.buffers]
        self._columns = places.columns(self.used)  # (B, T)
        reach = 0 if self.window is None else min(self.used) - (self.window - 1)
        self._first, self._end = max(reach, 0), max(self.used) + n_new
        self._ends = places.ends(self.used) if places.whole else None
        self.unread = False

    @property
    def n_keys(self) -> mx.array | None:
        """Positions each row holds, (B,), while whole buffers are handed out; a kernel asks."""
        self.unread = False
        return self._ends

    def undo(self) -> None:
        """Nothing: what was written lies behind each row's end."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write (B, heads, T, hd) behind each row's own end; returns what attention may see."""
        self.write([keys, values])
        if self._ends is not None:
            self.unread = True
            return self.buffers[0], self.buffers[1]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the latest `update_and_fetch` returned, for layers that share another's rows."""
        if self._ends is not None:
            raise KernelError("[ragged] Layers that share keys need them cut, got whole buffers.")
        keys, values = (a[..., self._first : self._end, :] for a in self.buffers)
        return keys, values

    def make_mask(
        self, n_rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Which of the fetched positions each new row sees: (B, 1, T, fetched), bool.

        With whole buffers the mask as mlx-lm's caches make it, where it is no array.
        """
        if self._ends is not None:
            return whole_mask(n_rows, window_size, return_array)
        rows = self._columns[:, None, :, None]
        seen = mx.arange(self._first, self._end)[None, None, None]
        mask = seen <= rows
        windows = [w for w in (window_size, self.window) if w is not None]
        return mask & (seen > rows - min(windows)) if windows else mask

    def keep(self, n_rows: int, n_keep: Sequence[int]) -> None:
        """Move each row's end."""
        self.used = [u + n for u, n in zip(self.used, n_keep, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        index = mx.array(list(rows), mx.int32)
        self.used = [self.used[row] for row in rows]
        end = max(self.used)
        self.buffers = [a[index, :, :end] for a in self.buffers]

    def row(self, row: int, offset: int) -> Any:
        """A single cache that goes on with one row."""
        keys, values = self._cut(row)
        if self.window is not None:
            return WindowCache.holding(keys, values, offset, self.window, self.slack)
        single = KVCache()
        single.keys, single.values, single.offset = keys, values, offset
        return single

    @property
    def capacity(self) -> int:
        """Positions that the buffers have room for."""
        return self.buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in self.buffers)

    def widen(self, capacity: int) -> None:
        """Make room for so many positions."""
        self.buffers = [_widened(a, capacity - a.shape[2]) for a in self.buffers]

    def _cut(self, row: int) -> list[mx.array]:
        end = self.used[row]
        return [mx.contiguous(a[row : row + 1, :, :end]) for a in self.buffers]

    def write(self, new: Sequence[mx.array]) -> None:
        """Put rows (B, heads, T, ..) for each buffer behind each row's own end."""
        start = self.used[0]
        together = min(self.used) == max(self.used)
        index = self._columns[:, None, :, None]
        for i, rows in enumerate(new):
            if together:
                self.buffers[i][..., start : self._end, :] = rows
            else:
                self.buffers[i] = mx.put_along_axis(self.buffers[i], index, rows, axis=2)

    def _drop_oldest(self, n_most: int) -> None:
        """Move each row to the front so that it holds at most `n_most` positions."""
        held = [min(u, n_most) for u in self.used]
        start = mx.array([u - h for u, h in zip(self.used, held, strict=True)], mx.int32)
        index = (start[:, None] + mx.arange(max(held)))[:, None, :, None]
        index = mx.minimum(index, self.capacity - 1)
        room = self.capacity - max(held)
        kept = [mx.take_along_axis(a, index, axis=2) for a in self.buffers]
        self.buffers = [_widened(a, room) for a in kept]
        self.used = held


class RaggedPacked(RaggedCache):
    """The same for a QuantizedKVCache: packed rows, scales and biases of keys, then of values.

    Args:
        buffers: Six arrays, shape (B, heads, capacity, ..).
        used: Positions held per row.
        group_size: Channels that share a scale.
        bits: Bits per channel.
    """

    def __init__(
        self, buffers: Sequence[mx.array], used: Sequence[int], group_size: int, bits: int
    ) -> None:
        super().__init__(buffers, used)
        self.group_size = group_size
        self.bits = bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Pack and write; returns the packed rows."""
        packed = [
            mx.quantize(a, group_size=self.group_size, bits=self.bits) for a in (keys, values)
        ]
        self.write([*packed[0], *packed[1]])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Two triples."""
        rows = [a[..., self._first : self._end, :] for a in self.buffers]
        return tuple(rows[:3]), tuple(rows[3:])

    def row(self, row: int, offset: int) -> QuantizedKVCache:
        """A single packed cache that goes on with one row."""
        rows = self._cut(row)
        single = QuantizedKVCache(group_size=self.group_size, bits=self.bits)
        single.keys, single.values, single.offset = tuple(rows[:3]), tuple(rows[3:]), offset
        return single


class RecurrentRows(RecurrentCache):
    """Recurrent states of B sequences, side by side."""

    def prepare(self, places: Places) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remember the states and note what the rows feed in."""
        self.open()

    def undo(self) -> None:
        """Go back to the states before."""
        if self.is_open:
            RecurrentCache.keep(self, 1, 0)

    def keep(self, n_rows: int, n_keep: int | Sequence[int]) -> None:
        """Close the block; each row takes the state after its own count."""
        if isinstance(n_keep, int):
            super().keep(n_rows, n_keep)
            return
        after = {n: self._slots_after(n_rows, n) for n in sorted(set(n_keep))}
        slots: list[mx.array] = []
        counts = mx.array(list(n_keep), mx.int32)
        for parts in zip(*after.values(), strict=True):
            slot = parts[0]
            for n, part in zip(list(after)[1:], parts[1:], strict=True):
                mine = (counts == n).reshape(-1, *([1] * (part.ndim - 1)))
                slot = mx.where(mine, part, slot)
            slots.append(slot)
        super().keep(n_rows, n_rows)
        self.cache = slots
        mx.async_eval(slots)

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        index = mx.array(list(rows), mx.int32)
        self.cache = [slot[index] for slot in self.cache]

    def row(self, row: int, offset: int) -> RecurrentCache:
        """A single cache that goes on with one row."""
        single = RecurrentCache(len(self.cache))
        single.cache = [mx.contiguous(slot[row : row + 1]) for slot in self.cache]
        return single


class RaggedList(CacheList):
    """Several entries of one layer."""

    def prepare(self, places: Places) -> None:  # pyright: ignore
        """Every entry."""
        for one in self.caches:
            one.prepare(places)

    def undo(self) -> None:
        """Every entry."""
        for one in self.caches:
            one.undo()

    def keep(self, n_rows: int, n_keep: Sequence[int]) -> None:
        """Every entry."""
        for one in self.caches:
            one.keep(n_rows, n_keep)

    def select(self, rows: Sequence[int]) -> None:
        """Every entry."""
        for one in self.caches:
            one.select(rows)

    def row(self, row: int, offset: int) -> CacheList:
        """A single list that goes on with one row."""
        return CacheList(*(one.row(row, offset) for one in self.caches))


def joined(parts: Sequence[Any]) -> Any:
    """One batch entry of single entries and batch entries of the same layer, rows in order."""
    first = parts[0]
    if isinstance(first, CacheList):
        layers = zip(*(part.caches for part in parts), strict=True)
        return RaggedList(*(joined(layer) for layer in layers))
    if isinstance(first, RecurrentCache):
        rows = RecurrentRows(len(first.cache))
        columns = zip(*(part.cache for part in parts), strict=True)
        rows.cache = [mx.concatenate(list(column)) for column in columns]
        return rows
    ragged = [_as_ragged(part) for part in parts]
    used = [u for one in ragged for u in one.used]
    capacity = (max(used) // _STEP + 1) * _STEP
    head = ragged[0]
    if head.window is not None:
        capacity = max(capacity, head.window + 2 * head.slack)
    columns = zip(*(one.buffers for one in ragged), strict=True)
    buffers = [mx.concatenate([_fitted(a, capacity) for a in column]) for column in columns]
    if isinstance(head, RaggedPacked):
        return RaggedPacked(buffers, used, head.group_size, head.bits)
    return RaggedCache(buffers, used, head.window, head.slack)


def whole_mask(n_rows: int, window_size: int | None, return_array: bool) -> str | None:
    """The mask over whole buffers as mlx-lm's caches make it; KernelError where it is an array."""
    if return_array or window_size is not None:
        raise KernelError("[buffers] Masks must be causal, got a window or an array.")
    return "causal" if n_rows > 1 else None


def reads_whole(entry: Any) -> bool:
    """True for plain keys and values of a batch, whose buffers a kernel can read whole."""
    return type(entry) is RaggedCache and entry.window is None


def can_join(entry: Any) -> bool:
    """True for the kinds of cache that this module knows."""
    if type(entry) is CacheList:
        return all(can_join(one) for one in entry.caches)
    return type(entry) in (KVCache, QuantizedKVCache, RecurrentCache, WindowCache)


def _as_ragged(entry: Any) -> RaggedCache:
    if isinstance(entry, RaggedCache):
        return entry
    if isinstance(entry, QuantizedKVCache):
        buffers = [*entry.keys, *entry.values]  # pyright: ignore[reportOptionalIterable]
        return RaggedPacked(buffers, [entry.offset], entry.group_size, entry.bits)
    buffers = [entry.keys, entry.values]
    if isinstance(entry, WindowCache):
        return RaggedCache(buffers, [entry.n_held], entry.window, entry.slack)
    return RaggedCache(buffers, [entry.offset])


def _fitted(array: mx.array, capacity: int) -> mx.array:
    have = array.shape[2]
    return array[:, :, :capacity] if have >= capacity else _widened(array, capacity - have)


def _widened(array: mx.array, n_rows: int) -> mx.array:
    if n_rows <= 0:
        return array
    shape = (*array.shape[:2], n_rows, array.shape[3])
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=2)
