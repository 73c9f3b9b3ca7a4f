"""One forward of an mlx-lm model through its own top-level call, with what a target needs noted.

The model computes its logits itself, multipliers and softcaps included; nothing of its head is
written again here. The backbone is watched: its output is noted, and cut to the rows whose logits
are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_targets.families.base import Family
from spec_targets.swap import Swaps
from spec_targets.taps import Taps, Trace, first_of


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
        self._wanted: Callable[[mx.array], mx.array] | None = None  # rows that meet the head; all
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
        self._wanted = _last if last_only else None
        try:
            with self.taps.record(taps, trace) as seen:
                logits = self._model(tokens[None], cache=entries)[0]
                hidden = self._hidden
                if hidden is None:
                    raise RuntimeError("[forward] The model must call its backbone, and did not.")
                return Pass(logits, hidden[0], tuple(seen[layer][0] for layer in taps))
        finally:
            self._wanted = self._hidden = None

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
        self,
        tokens: mx.array,
        entries: list[Any],
        taps: Sequence[int] = (),
        *,
        at: mx.array | None = None,
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Ids (B, T) of B sequences: logits (B, T, V), and taps (B, T, H) each.

        With `at`, shape (B,), logits are (B, 1, V): of each sequence's row at that index.
        """
        if at is not None:
            self._wanted = lambda hidden: mx.take_along_axis(hidden, at[:, None, None], axis=1)
        try:
            with self.taps.record(taps) as seen:
                logits = self._model(tokens, cache=entries)
                return logits, tuple(seen[layer] for layer in taps)
        finally:
            self._wanted = self._hidden = None

    def undo(self) -> None:
        """Stop watching."""
        self._swaps.undo()
        self.taps.undo()

    def _watch(self, backbone: nn.Module) -> None:
        original = type(backbone)

        def call(module: Any, *args: Any, **kwargs: Any) -> mx.array:
            self._hidden = hidden = original.__call__(module, *args, **kwargs)
            return hidden if self._wanted is None else self._wanted(hidden)

        self._swaps.swap(backbone, {"__call__": call})


def _last(hidden: mx.array) -> mx.array:
    return hidden[:, -1:]


def tap_refusal(
    done: Pass, trace: Trace, final: mx.array, unembed: Callable[[mx.array], mx.array]
) -> str | None:
    """Why a drafter may not read taps or use the raw ends, or None.

    The output of every layer must be what enters the next one, that of the last must lead to the
    backbone's own, and that through the raw head to the model's own arg-maxima (its multiplier and
    softcap keep the order).

    Args:
        done: What `Forward.probe` gave, here and in the next two.
        trace: Of the same forward.
        final: What the family makes of the last layer's output.
        unembed: The raw head.
    """
    last = len(done.taps) - 1
    for layer, tap in enumerate(done.taps[:-1]):
        # Not always the first argument: talkie's layers take the embedding before it. And a
        # stream in copies goes on as copies, of which the tap is the mean.
        left = (tap, first_of(trace.left[layer])[0])
        entered = trace.fed[layer + 1]
        if not any(_same_rows(rows, array) for rows in left for array in entered):
            return f"the output of layer {layer} is not what enters layer {layer + 1}"
    if done.taps[last].shape != done.hidden.shape or not close(final, done.hidden):
        return f"the output of layer {last} does not lead to the model's own hidden states"
    raw, own = unembed(done.hidden), done.logits
    if (
        raw.shape != own.shape
        or not mx.array_equal(mx.argmax(raw, axis=-1), mx.argmax(own, axis=-1)).item()
    ):
        return "the raw head does not lead to the model's own arg-maxima"
    return None


def close(got: mx.array, want: mx.array) -> bool:
    """Equal up to rounding: 1% of the largest value."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    near = mx.abs(got - want).max() <= 0.01 * mx.abs(want).max()
    return bool(near.item())  # sync: once, at load


def _same_rows(rows: mx.array, batch: mx.array) -> bool:
    """Whether rows (T, ..) are the first of a batch (B, T, ..)."""
    return batch.shape[1:] == rows.shape and close(rows, batch[0])
