"""Hidden states of chosen layers, recorded while a model runs its own forward.

Layers are counted as the residual stream passes them: a looped model runs each layer object once
per loop, and ids go on counting. The tap of a loop's last layer is what enters the next loop, which
is what drafters of looped models were trained on. Knows nothing about what the states are for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_targets.swap import Swaps


def first_of(result: Any) -> mx.array:
    """What a layer returns, or the first part of it: the residual stream of most models."""
    return result[0] if isinstance(result, tuple) else result


@dataclass(slots=True)
class Trace:
    """What passed the layers of one forward, by layer id.

    Attributes:
        fed: The arrays that entered.
        left: What the layer returned, as it is.
    """

    fed: dict[int, list[mx.array]] = field(default_factory=dict)
    left: dict[int, Any] = field(default_factory=dict)


class Taps:
    """Recorder on the layers of one model instance.

    Args:
        layers: The model's decoder layer objects.
        n_loops: How often one forward runs all of them.
        between_loops: From a loop's last output to what enters the next loop.
        stream: From what a layer returns to the residual stream after it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        n_loops: int = 1,
        between_loops: Callable[[mx.array], mx.array] = lambda hidden: hidden,
        stream: Callable[[Any], mx.array] = first_of,
    ) -> None:
        self._layers = list(layers)
        self._between_loops = between_loops
        self._stream = stream
        self.n_layers = n_loops * len(self._layers)
        self._swaps = Swaps()
        self._swapped: set[int] = set()
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, mx.array] = {}
        self._trace: Trace | None = None
        self._n_calls: dict[int, int] = {}

    @contextmanager
    def record(
        self, wanted: Sequence[int], trace: Trace | None = None
    ) -> Iterator[dict[int, mx.array]]:
        """Record the outputs of some layers during the block.

        Args:
            wanted: 0-based layer ids.
            trace: Filled with what enters and leaves each of these layers, to check the chain.

        Yields:
            A dict that fills with layer id -> output, shape (B, T, H).

        Raises:
            ValueError: a layer id is outside the model.
        """
        for idx in wanted:
            if not 0 <= idx < self.n_layers:
                raise ValueError(f"[taps] Layer ids must be in 0..{self.n_layers - 1}, got {idx}.")
            self._swap(idx % len(self._layers))
        self._wanted, self._seen, self._n_calls = frozenset(wanted), {}, {}
        self._trace = trace
        try:
            yield self._seen
        finally:
            self._wanted, self._seen, self._n_calls = frozenset(), {}, {}
            self._trace = None

    def undo(self) -> None:
        """Give every layer its own class back."""
        self._swaps.undo()
        self._swapped.clear()

    def _tapped(self, layer_id: int, result: Any) -> mx.array:
        """The residual stream after a layer, out of what the layer returned."""
        hidden = self._stream(result)
        ends_loop = (layer_id + 1) % len(self._layers) == 0
        return self._between_loops(hidden) if ends_loop and layer_id + 1 < self.n_layers else hidden

    def _swap(self, idx: int) -> None:
        """Let the layer object `idx` report its outputs; only once."""
        if idx in self._swapped:
            return
        original = type(self._layers[idx])

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original.__call__(layer, *args, **kwargs)
            if self._wanted:
                loop = self._n_calls.get(idx, 0)
                self._n_calls[idx] = loop + 1
                layer_id = loop * len(self._layers) + idx
                if layer_id in self._wanted:
                    self._seen[layer_id] = self._tapped(layer_id, result)
                    if self._trace is not None:
                        entered = (*args, *kwargs.values())
                        self._trace.fed[layer_id] = [a for a in entered if isinstance(a, mx.array)]
                        self._trace.left[layer_id] = result
            return result

        self._swaps.swap(self._layers[idx], {"__call__": call})
        self._swapped.add(idx)
