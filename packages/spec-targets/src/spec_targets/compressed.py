"""DeepSeek-V4.1's layer cache with rows that can be taken back.

A layer holds its sliding window and, where it compresses, one latent (and one index key) for every
closed group of tokens, beside the projected rows of the group that is still open. Those rows are
lost when a group closes; while a block is open they are noted, so that a group which a rejected row
closed can be opened again from the very numbers it was made of. Nothing is computed twice.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.deepseek_v41 import LayerCache

from spec_targets.swap import Swaps

_PROJECTIONS = ("kv_proj", "gate_proj")
_ARRAYS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class CompressedCache(LayerCache):
    """Drop-in for LayerCache. Its arrays are rebound and never written to."""

    def __init__(self, window_size: int) -> None:
        super().__init__(window_size)
        self._before: dict[str, Any] | None = None
        self._rows: mx.array | None = None  # the window and the whole block, while one is open
        self._ratio = 0  # tokens of a group; 0 where the layer compresses nothing
        self._projected: tuple[mx.array, ...] = ()  # the block's rows, one array a projection

    @property
    def is_open(self) -> bool:
        """True while a block's rows are noted."""
        return self._before is not None

    def open(self) -> None:
        """Remember the state and note what the next rows bring."""
        self._before = {name: getattr(self, name) for name in ("offset", *_ARRAYS)}
        self._rows, self._ratio, self._projected = None, 0, ()

    @classmethod
    def holding(
        cls, arrays: Sequence[mx.array], offset: int, details: Sequence[int]
    ) -> "CompressedCache":
        """A cache that goes on from what `frozen` gave."""
        window_size, *there = details
        cache, left = cls(window_size), iter(arrays)
        cache.offset = offset
        for name, is_there in zip(_ARRAYS, there, strict=True):
            setattr(cache, name, mx.contiguous(next(left)) if is_there else None)
        return cache

    def frozen(self) -> tuple[tuple[mx.array, ...], int, tuple[int, ...]]:
        """Copies of the arrays that hold anything, the offset, and what the arrays are."""
        found = [getattr(self, name) for name in _ARRAYS]
        there = [array is not None and array.size > 0 for array in found]
        held = tuple(mx.contiguous(a) for a, is_there in zip(found, there, strict=True) if is_there)
        return held, self.offset, (self.window_size, *map(int, there))

    def update_window(self, kv: mx.array) -> mx.array:
        """Append rows (B, T, D); returns the window before them and all of them."""
        rows = super().update_window(kv)
        if self.is_open:
            self._rows = rows
        return rows

    def note_group(self, ratio: int, projected: tuple[mx.array, ...]) -> None:
        """A compressor ran: `ratio` tokens a group, and the block's rows that it projected."""
        self._ratio, self._projected = ratio, projected

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Close the block of `n_rows` rows and keep its first `n_keep`."""
        before, rows = self._before, self._rows
        self._before = self._rows = None
        if before is None or n_keep == n_rows:
            return
        self.offset = before["offset"] + n_keep
        if n_keep == 0 or rows is None:
            for name, value in before.items():
                setattr(self, name, value)
            return
        end = rows.shape[1] - n_rows + n_keep
        self.window = rows[:, max(0, end - self.window_size) : end]
        if self._ratio:
            self._reopen_groups(before, n_keep)

    def _reopen_groups(self, before: dict[str, Any], n_keep: int) -> None:
        """Groups as they stand after the block's first `n_keep` rows."""
        n_groups = self.offset // self._ratio
        for name in ("compress_kv", "index_k"):
            made = getattr(self, name)
            if made is not None:
                setattr(self, name, made[:, :n_groups] if n_groups else None)
        n_pending = self.offset % self._ratio
        for name, block in zip(("pending_kv", "pending_gate"), self._projected, strict=False):
            rows = block[:, :n_keep]
            if before[name] is not None:
                rows = mx.concatenate([before[name], rows], axis=1)
            setattr(self, name, rows[:, rows.shape[1] - n_pending :])


def watch_compressor(compressor: nn.Module) -> None:
    """Let a compressor note what it projects in the open CompressedCache that it is called with."""
    swaps = Swaps()
    projected: dict[str, mx.array] = {}
    original: Any = type(compressor).__call__

    def call(module: Any, x: mx.array, start_pos: int, cache: Any) -> Any:
        projected.clear()
        result = original(module, x, start_pos, cache)
        if isinstance(cache, CompressedCache) and cache.is_open:
            held = module.ratio > 1  # groups of one are closed at once
            rows = tuple(projected[name] for name in _PROJECTIONS) if held else ()
            cache.note_group(module.ratio, rows)
        projected.clear()
        return result

    swaps.swap(compressor, {"__call__": call})
    for name in _PROJECTIONS:
        if name in compressor:
            _note_output(swaps, compressor[name], projected, name)


def _note_output(
    swaps: Swaps, projection: nn.Module, projected: dict[str, mx.array], name: str
) -> None:
    original: Any = type(projection).__call__

    def call(module: Any, x: mx.array) -> mx.array:
        projected[name] = out = original(module, x)
        return out

    swaps.swap(projection, {"__call__": call})
