"""One forward of an mlx-lm model through its own top-level call, with what a target needs noted.

The model computes its logits itself, multipliers and softcaps included; nothing of its head is
written again here. The backbone is watched: its output is noted, and cut to the last row when only
that row's logits are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_targets.families.base import Family
from spec_targets.swap import Swaps
from spec_targets.taps import Taps, Trace


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward gives.

    Attributes:
        logits: Shape (T, V), or (1, V) when only the last row was asked for.
        hidden: The backbone's output, shape (T, H).
        taps: Shape (T, H) per tapped layer.
    """

    logits: mx.array
    hidden: mx.array
    taps: tuple[mx.array, ...]


class Forward:
    """The watched model.

    Args:
        model: An mlx-lm model.
        family: Where its backbone and layers are.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self._model = model
        self._family = family
        self.taps = Taps(
            family.layers(model),
            family.n_loops(model),
            lambda hidden: family.between_loops(model, hidden),
            family.stream,
        )
        self._last_only = False
        self._hidden: mx.array | None = None
        self._swaps = Swaps()
        self._watch(family.backbone(model))

    def __call__(
        self,
        tokens: mx.array,
        entries: list[Any],
        taps: Sequence[int] = (),
        *,
        last_only: bool = False,
        trace: Trace | None = None,
    ) -> Pass:
        """Ids of shape (T,) through the model; its cache entries grow by T rows.

        `trace` is filled with what enters and leaves each tapped layer.
        """
        self._last_only = last_only
        try:
            with self.taps.record(taps, trace) as seen:
                logits = self._model(tokens[None], cache=entries)[0]
                hidden = self._hidden
                if hidden is None:
                    raise RuntimeError("[forward] The model must call its backbone, and did not.")
                return Pass(logits, hidden[0], tuple(seen[layer][0] for layer in taps))
        finally:
            self._last_only, self._hidden = False, None

    def probe(self, tokens: mx.array, entries: list[Any]) -> tuple[Pass, Trace, mx.array]:
        """A forward with every layer tapped.

        Returns:
            The pass, what entered and left each layer, and the (T, H) that the family makes of what
            the last one left.
        """
        trace, every = Trace(), range(self.taps.n_layers)
        done = self(tokens, entries, every, trace=trace)
        self.taps.undo()  # later only the layers that a drafter asks for
        return done, trace, self._family.final(self._model, trace.left[every[-1]])[0]

    def rows(
        self, tokens: mx.array, entries: list[Any], taps: Sequence[int] = ()
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Ids (B, T) of B sequences: logits (B, T, V), and taps (B, T, H) each."""
        try:
            with self.taps.record(taps) as seen:
                logits = self._model(tokens, cache=entries)
                return logits, tuple(seen[layer] for layer in taps)
        finally:
            self._hidden = None

    def undo(self) -> None:
        """Stop watching."""
        self._swaps.undo()
        self.taps.undo()

    def _watch(self, backbone: nn.Module) -> None:
        original = type(backbone)

        def call(module: Any, *args: Any, **kwargs: Any) -> mx.array:
            self._hidden = hidden = original.__call__(module, *args, **kwargs)
            return hidden[:, -1:] if self._last_only else hidden

        self._swaps.swap(backbone, {"__call__": call})
