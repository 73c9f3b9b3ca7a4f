"""How one cache entry forgets the rows of a block that were not kept: one strategy per kind.

A kind that is not known here is refused: drafting on a state that cannot be rolled back would
change the answer without a word.
"""

from collections.abc import Callable
from typing import Any, Protocol

from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from spec_core import LoadError
from spec_targets.window import WindowCache


class Rollback(Protocol):
    """Bound to one cache entry of one sequence."""

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Of the newest `n_rows` rows keep the first `n_keep`."""
        ...


class Trim:
    """For entries whose rows are positions: moving the end is enough."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Trim the rest."""
        if n_rows > n_keep:
            self._entry.trim(n_rows - n_keep)


def replace_entry(entry: Any) -> Any:
    """The entry that serves in place of the one mlx-lm made; most stay as they are."""
    if type(entry) is RotatingKVCache and entry.keep == 0:
        return WindowCache(entry.max_size)
    return entry


_STRATEGIES: dict[type, Callable[[Any], Rollback]] = {
    ChunkedKVCache: Trim,
    KVCache: Trim,
    WindowCache: Trim,
}


def rollback_for(entry: Any, layer: int, model_type: str) -> Rollback:
    """The strategy for a cache entry.

    Raises:
        LoadError: no strategy for this kind.
    """
    strategy = _STRATEGIES.get(type(entry))
    if strategy is None:
        raise LoadError(
            f'[rollback] Layer {layer} keeps a {type(entry).__name__}, which family "{model_type}" '
            "cannot roll back. Use another model, or plain mlx-lm for this one."
        )
    return strategy(entry)
