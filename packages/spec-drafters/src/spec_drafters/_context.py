"""Keys and values of committed rows, one cache per layer, without copies that grow with depth.

A buffer grows by doubling up to its window and is then written round and round. The rows of a block
are written behind the context and forgotten: the next committed rows overwrite them. Attention
reads one slice of the buffer, in whatever order the rows lie: their positions are in the keys.
Knows nothing about heads or masks.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

_FIRST = 256  # rows of the first buffer


@dataclass(frozen=True, slots=True)
class ContextState:
    """A snapshot of one layer's cache.

    Attributes:
        n_rows: Rows seen so far.
        keys: The buffer, or None before the first row.
        values: The buffer, or None before the first row.
    """

    n_rows: int
    keys: mx.array | None
    values: mx.array | None


class ContextCache:
    """Keys and values of one layer's context.

    Args:
        window: Rows kept, the newest; None keeps all.
        n_block: Most rows of a block.
    """

    def __init__(self, window: int | None, n_block: int) -> None:
        self._window = window
        self._n_block = n_block
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self.n_rows = 0

    @property
    def n_used(self) -> int:
        """Rows that attention sees."""
        return self.n_rows if self._window is None else min(self.n_rows, self._window)

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers, for evaluation."""
        return [a for a in (self._keys, self._values) if a is not None]

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add committed rows: (1, n_kv, M, head_dim) each."""
        n_new = keys.shape[2]
        window = self._window
        if window is not None and n_new > window:
            self.n_rows += n_new - window
            keys, values = keys[:, :, -window:], values[:, :, -window:]
            n_new = window
        self._reserve(self.n_used + n_new, keys, values)
        start = self.n_rows if window is None else self.n_rows % window
        n_first = n_new if window is None else min(n_new, window - start)
        self._write(start, keys[:, :, :n_first], values[:, :, :n_first])
        if n_first < n_new:
            self._write(0, keys[:, :, n_first:], values[:, :, n_first:])
        self.n_rows += n_new

    def skip(self, n_rows: int) -> None:
        """Count rows that the next `append` would push out of the window anyway."""
        self.n_rows += n_rows

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Context rows followed by a block's rows; the block is not kept.

        Args:
            keys: Shape (1, n_kv, B, head_dim).
            values: Same shape.

        Returns:
            Keys and values, (1, n_kv, n_used + B, head_dim).
        """
        n_used, n_block = self.n_used, keys.shape[2]
        if n_used == 0:
            return keys, values
        self._write(n_used, keys, values)
        assert self._keys is not None and self._values is not None
        end = n_used + n_block
        return self._keys[:, :, :end], self._values[:, :, :end]

    def rows(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values of the context alone, (1, n_kv, n_used, head_dim); None when empty."""
        if self.n_used == 0 or self._keys is None or self._values is None:
            return None, None
        return self._keys[:, :, : self.n_used], self._values[:, :, : self.n_used]

    def positions(self) -> mx.array:
        """Absolute position of each context row as it lies in the buffer, (n_used,) int32."""
        slots = mx.arange(self.n_used)
        if self._window is None or self.n_rows <= self._window:
            return slots
        newest = self.n_rows - 1
        return newest - (newest - slots) % self._window

    def fork(self) -> "ContextCache":
        """An empty cache with the same limits."""
        return ContextCache(self._window, self._n_block)

    def reset(self) -> None:
        """Forget all rows, and the buffer: writes may wait in it that only this thread can do."""
        self.n_rows = 0
        self._keys = self._values = None

    def state(self) -> ContextState:
        """A snapshot that later writes do not change (the first of them copies the buffer)."""
        return ContextState(self.n_rows, _alias(self._keys), _alias(self._values))

    def shortened(self, state: ContextState, n_rows: int) -> ContextState | None:
        """The snapshot with its first rows alone; None where they are not all there."""
        left_window = self._window is not None and state.n_rows > self._window
        if n_rows > state.n_rows or (n_rows < state.n_rows and left_window):
            return None
        return replace(state, n_rows=n_rows)

    def restore(self, state: ContextState) -> None:
        """Go on from a snapshot."""
        self.n_rows = state.n_rows
        self._keys, self._values = _alias(state.keys), _alias(state.values)

    def _write(self, start: int, keys: mx.array, values: mx.array) -> None:
        assert self._keys is not None and self._values is not None
        end = start + keys.shape[2]
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values

    def _reserve(self, n_needed: int, keys: mx.array, values: mx.array) -> None:
        """Make room for n_needed rows of context (at most the window) and a block."""
        held = 0 if self._keys is None else self._keys.shape[2] - self._n_block
        if self._window is not None:
            n_needed = min(n_needed, self._window)
        if n_needed <= held:
            return
        size = max(n_needed, 2 * held, _FIRST)
        if self._window is not None:
            size = min(size, self._window)
        self._keys = _grown(self._keys, keys, size + self._n_block, self.n_used)
        self._values = _grown(self._values, values, size + self._n_block, self.n_used)


Rows = list[tuple[mx.array, mx.array]]  # keys and values of every layer
BodyState = tuple[ContextState, ...]


class ContextBody:
    """The layers of a block drafter and the context of one sequence: one cache a layer.

    A family says what a committed row becomes in each layer, and how a block is forwarded.
    """

    _caches: list[ContextCache]
    _unflushed: bool = False

    @property
    def n_rows(self) -> int:
        """N, committed rows observed."""
        return self._caches[0].n_rows

    def observe(self, taps: Sequence[mx.array]) -> None:
        """Append committed rows: one tap of shape (M, H_target) per tapped layer."""
        take_in([self], [self._context_rows(taps)])

    def hidden(self, anchor: int, n_rows: int) -> mx.array:
        """Forward the block `[anchor, mask, ...]` and return its rows, (n_rows, H)."""
        raise NotImplementedError

    def _context_rows(self, taps: Sequence[mx.array]) -> Rows:
        """Keys and values of M committed rows for every layer, (1, n_kv, M, head_dim) each."""
        raise NotImplementedError

    def fork(self) -> Self:
        """The same weights with an empty context."""
        other = copy.copy(self)
        other._caches = [cache.fork() for cache in self._caches]
        other._unflushed = False
        return other

    def reset(self) -> None:
        """Forget the context."""
        for cache in self._caches:
            cache.reset()
        self._unflushed = False

    def state(self) -> BodyState:
        """A snapshot of the context."""
        return tuple(cache.state() for cache in self._caches)

    def shortened(self, state: BodyState, n_rows: int) -> BodyState | None:
        """A snapshot with its first rows alone; None where they are not all there."""
        parts = [c.shortened(part, n_rows) for c, part in zip(self._caches, state, strict=True)]
        whole = tuple(part for part in parts if part is not None)
        return whole if len(whole) == len(parts) else None

    def restore(self, state: BodyState) -> None:
        """Go on from a snapshot."""
        for cache, part in zip(self._caches, state, strict=True):
            cache.restore(part)


def take_in(bodies: Sequence[ContextBody], rows: Sequence[Rows]) -> None:
    """Append to each body's context what its committed rows became; enqueues, waits for nothing."""
    late = [one for one in bodies if one._unflushed]
    if late:
        # Writes of an earlier call that no draft has read; done by now, so this is in place.
        mx.async_eval([a for one in late for cache in one._caches for a in cache.arrays])
    mx.async_eval(list(rows))
    # The writes themselves stay in the graph until the next draft or observe: MLX writes in
    # place only into a buffer that no running computation holds.
    for one, own in zip(bodies, rows, strict=True):
        for cache, (keys, values) in zip(one._caches, own, strict=True):
            cache.append(keys, values)
        one._unflushed = True


def _grown(old: mx.array | None, like: mx.array, n_rows: int, n_used: int) -> mx.array:
    _, n_kv, _, head_dim = like.shape
    new = mx.zeros((1, n_kv, n_rows, head_dim), like.dtype)
    if old is not None:
        n_held = min(n_used, old.shape[2])  # skipped rows are counted, and were never written
        new[:, :, :n_held] = old[:, :, :n_held]
    return new


def _alias(array: mx.array | None) -> mx.array | None:
    """A second name for the same values, so that writing to one leaves the other."""
    return None if array is None else array[...]
