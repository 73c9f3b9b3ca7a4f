"""Hidden states of chosen layers, recorded while a model runs its own forward.

The class of each layer object is swapped for a subclass that notes what the layer returns; the
layer's class, its parameters and other instances are untouched, and `undo` puts the class back.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Taps:
    """Recorder on the layers of one model instance.

    Args:
        layers: The model's decoder layers.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._classes = [type(layer) for layer in self._layers]
        self._swapped: set[int] = set()
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, mx.array] = {}

    @contextmanager
    def record(self, wanted: Sequence[int]):
        """Record the outputs of some layers during the block.

        Args:
            wanted: 0-based layer ids.

        Yields:
            A dict that fills with layer id -> output, shape (B, T, H).

        Raises:
            ValueError: a layer id is outside the model.
        """
        for idx in wanted:
            if not 0 <= idx < len(self._layers):
                raise ValueError(
                    f"[taps] Layer ids must be in 0..{len(self._layers) - 1}, got {idx}."
                )
            self._swap(idx)
        self._wanted, self._seen = frozenset(wanted), {}
        try:
            yield self._seen
        finally:
            self._wanted, self._seen = frozenset(), {}

    def undo(self) -> None:
        """Give every layer its own class back."""
        for idx in self._swapped:
            self._layers[idx].__class__ = self._classes[idx]
        self._swapped.clear()

    def _swap(self, idx: int) -> None:
        if idx in self._swapped:
            return
        original = self._classes[idx]
        taps = self

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__call__(layer, *args, **kwargs)
            if idx in taps._wanted:
                taps._seen[idx] = result[0] if isinstance(result, tuple) else result
            return result

        subclass = type(original.__name__, (original,), {"__call__": call})
        self._layers[idx].__class__ = subclass
        self._swapped.add(idx)
