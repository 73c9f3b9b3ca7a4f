"""Keys and values of a sliding-window layer, kept in temporal order with room to roll back.

mlx-lm's RotatingKVCache overwrites the oldest rows in place, so a rejected row cannot be taken back
once the window is full. Here the rows stay in order behind a little slack: writing appends, rolling
back moves two integers, and a row's attention sums run in the same order at any block width.

Metal's attention deals keys out to its 32 lanes by their index, so what is returned starts at a
position that is a multiple of 32, and a mask hides the rows before the window.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

_LANES = 32


class WindowCache:
    """Drop-in for RotatingKVCache (keep=0) in an mlx-lm model.

    Args:
        window: W: a row attends to itself and the W - 1 rows before it.
        slack: Most rows that `trim` can take back once rows have been dropped.
    """

    def __init__(self, window: int, slack: int = 128) -> None:
        self.window = window
        self.slack = slack
        self.offset = 0  # absolute position of the next row
        self.keys: mx.array | None = None  # (B, heads, capacity, hd)
        self.values: mx.array | None = None
        self._n = 0  # rows in use; the last one is at position offset - 1
        self._first = 0  # first row that the latest fetch returned

    @classmethod
    def holding(
        cls, keys: mx.array, values: mx.array, offset: int, window: int, slack: int = 128
    ) -> "WindowCache":
        """A cache that goes on from rows in temporal order, the newest at position offset - 1."""
        cache = cls(window, slack)
        cache.keys, cache.values, cache.offset = keys, values, offset
        cache._n = keys.shape[2]
        return cache

    @property
    def n_held(self) -> int:
        """Rows in use, in temporal order from the start of the buffer."""
        return self._n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows (B, heads, T, hd); returns them and the rows before them that count."""
        n_new = keys.shape[2]
        held_keys, held_values = self._room_for(keys, values)
        start, end = self._n, self._n + n_new
        self._first = start - self._n_before()
        held_keys[..., start:end, :] = keys
        held_values[..., start:end, :] = values
        self.keys, self.values = held_keys, held_values
        self._n, self.offset = end, self.offset + n_new
        return held_keys[..., self._first : end, :], held_values[..., self._first : end, :]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the latest `update_and_fetch` returned, for layers that share another's rows."""
        if self.keys is None or self.values is None:
            raise ValueError("[window] A layer must write rows before another one can read them.")
        rows = slice(self._first, self._n)
        return self.keys[..., rows, :], self.values[..., rows, :]

    def make_mask(
        self, n_rows: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Mask for the next `n_rows` rows over what `update_and_fetch` will return."""
        window = min(window_size or self.window, self.window)
        before = self._n_before()
        if before + n_rows > window:
            return create_causal_mask(n_rows, before, window_size=window)
        if return_array:
            return create_causal_mask(n_rows, before)
        return None if n_rows == 1 else "causal"

    def trim(self, n: int) -> int:
        """Forget the newest `n` rows.

        Raises:
            ValueError: so many rows are gone that the window before them is no longer whole.
        """
        whole = self._n == self.offset  # nothing was ever dropped
        if n > self._n or (not whole and self._n - n < self.window - 1):
            raise ValueError(
                f"[window] At most {self.slack} rows can be rolled back once the window of "
                f"{self.window} is full, got {n}. Verify fewer drafts."
            )
        self._n -= n
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        """True: within the slack."""
        return True

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """Arrays to evaluate."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def empty(self) -> bool:
        """True before the first row."""
        return self.keys is None

    def _n_before(self) -> int:
        """Rows before the next ones that a fetch returns: the window, from a multiple of 32 on."""
        oldest = self.offset - self._n  # absolute position of the first row held
        first = max(0, self.offset - self.window + 1) // _LANES * _LANES
        return self.offset - max(oldest, first)

    @property
    def _capacity(self) -> int:
        """Rows of a buffer: the window, what aligns it, and the slack twice."""
        return self.window + _LANES - 1 + 2 * self.slack

    def _room_for(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Buffers with room for the new rows; drops the oldest rows only when they are full."""
        n_new = keys.shape[2]
        if self.keys is None or self.values is None:
            capacity = max(self._capacity, n_new)
            return _zeros(keys, capacity), _zeros(values, capacity)
        if self._n + n_new <= self.keys.shape[2]:
            return self.keys, self.values
        kept = min(self._n, self.window + _LANES - 2 + self.slack)
        capacity = max(self._capacity, kept + n_new)
        parts: list[Any] = []
        for old, new in ((self.keys, keys), (self.values, values)):
            rest = _zeros(new, capacity - kept)
            parts.append(mx.concatenate([old[..., self._n - kept : self._n, :], rest], axis=2))
        self._n = kept
        return parts[0], parts[1]


def _zeros(like: mx.array, n_rows: int) -> mx.array:
    batch, heads, _, head_dim = like.shape
    return mx.zeros((batch, heads, n_rows, head_dim), like.dtype)
