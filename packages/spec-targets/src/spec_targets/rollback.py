"""How one cache entry forgets the rows of a block that were not kept: one strategy per kind.

A kind that is not known here is refused: drafting on a state that cannot be rolled back would
change the answer without a word.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from spec_core import LoadError
from spec_targets.compressed import CompressedCache
from spec_targets.recurrent import RecurrentCache
from spec_targets.window import WindowCache


class Rollback(Protocol):
    """Bound to one cache entry of one sequence."""

    def open(self) -> None:
        """A block of rows is about to be written."""
        ...

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Of the block's `n_rows` rows keep the first `n_keep`."""
        ...


class Trim:
    """For entries whose rows are positions: moving the end is enough."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def open(self) -> None:
        """Nothing to remember."""

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Trim the rest."""
        if n_rows > n_keep:
            self._entry.trim(n_rows - n_keep)


class Noting:
    """For entries that note what a block feeds them, and rebuild their state from that.

    Recurrent ones run the recurrence again over the rows that are kept; compressed ones open groups
    again that rejected rows had closed.
    """

    def __init__(self, entry: RecurrentCache | CompressedCache) -> None:
        self._entry = entry

    def open(self) -> None:
        """Remember the state; note what the block feeds in."""
        self._entry.open()

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Rebuild the state after the kept rows."""
        self._entry.keep(n_rows, n_keep)


class Each:
    """For a layer with several entries: each one its own way."""

    def __init__(self, parts: list[Rollback]) -> None:
        self._parts = parts

    def open(self) -> None:
        """Open every part."""
        for one in self._parts:
            one.open()

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Roll every part back."""
        for one in self._parts:
            one.keep(n_rows, n_keep)


def replace_entry(entry: Any) -> Any:
    """The entry that serves in place of the one mlx-lm made; most stay as they are."""
    if type(entry) is RotatingKVCache and entry.keep == 0:
        return WindowCache(entry.max_size)
    if type(entry) is ArraysCache:
        return RecurrentCache(len(entry.cache))
    if type(entry) is LayerCache:
        return CompressedCache(entry.window_size)
    if type(entry) is CacheList:
        return CacheList(*(replace_entry(one) for one in entry.caches))
    return entry


_STRATEGIES: dict[type, Callable[[Any], Rollback]] = {
    ChunkedKVCache: Trim,
    KVCache: Trim,
    QuantizedKVCache: Trim,
    CompressedCache: Noting,
    RecurrentCache: Noting,
    WindowCache: Trim,
}


def rollback_for(entry: Any, layer: int, model_type: str) -> Rollback:
    """The strategy for a cache entry.

    Raises:
        LoadError: no strategy for this kind.
    """
    if type(entry) is CacheList:
        return Each([rollback_for(one, layer, model_type) for one in entry.caches])
    strategy = _STRATEGIES.get(type(entry))
    if strategy is None:
        raise LoadError(
            f'[rollback] Layer {layer} keeps a {type(entry).__name__}, which family "{model_type}" '
            "cannot roll back. Use another model, or plain mlx-lm for this one."
        )
    return strategy(entry)
