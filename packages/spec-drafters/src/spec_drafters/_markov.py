"""The sequential part of DSpark: a low-rank bias from the token before, and its confidence.

References:
    DSpark, DeepSpec release: vanilla, gated and recurrent Markov heads over W2 W1[previous].
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from spec_drafters._linear import Matrix
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Weights of the Markov head.

    Attributes:
        kind: "vanilla", "gated" or "rnn".
        before: V x r table, indexed by target ids.
        after: r -> Vd.
        mixer: The gate's or the recurrence's projection; None for vanilla.
        rank: r.
    """

    kind: str
    before: Matrix
    after: Matrix
    mixer: Matrix | None
    rank: int

    def bias(
        self, embedded: mx.array, hidden: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The bias of one slot, and the state for the next.

        Args:
            embedded: W1[previous token] of R sequences, shape (R, r).
            hidden: The slot's final normed rows, shape (R, H).
            state: Recurrent state, shape (R, r); zeros at the first slot.

        Returns:
            Bias of shape (R, Vd), state of shape (R, r).
        """
        if self.mixer is None:
            return self.after(embedded), state
        if self.kind == "gated":
            gate = mx.sigmoid(self.mixer(mx.concatenate([hidden, embedded], axis=-1)))
            return self.after(gate * embedded), state
        mixed = self.mixer(mx.concatenate([state, embedded, hidden], axis=-1))
        gate, candidate, out = mx.split(mixed, 3, axis=-1)
        keep = mx.sigmoid(gate)
        state = keep * state + (1 - keep) * mx.tanh(candidate)
        return self.after(mx.tanh(out)), state


def load_markov(
    weights: Weights,
    kind: str,
    width: int,
    *,
    vocab_size: int,
    n_draft: int,
    prefix: str = "markov_head",
    tables: tuple[str, str] = ("markov_w1", "markov_w2"),
) -> MarkovHead:
    """Take the Markov head's tensors; the rank comes from their shape.

    Args:
        weights: Where they are.
        kind: "vanilla", "gated" or "rnn".
        width: H.
        vocab_size: V.
        n_draft: Vd.
        prefix: What their names start with.
        tables: Names of W1 and W2.
    """
    before, after = (f"{prefix}.{name}" for name in tables)
    _, rank = weights.matrix_shape(after)
    mixer = None
    if kind == "gated":
        mixer = weights.matrix(f"{prefix}.gate_proj", rank, width + rank)
    elif kind == "rnn":
        mixer = weights.matrix(f"{prefix}.joint_proj", 3 * rank, 2 * rank + width)
    return MarkovHead(
        kind=kind,
        before=weights.matrix(before, vocab_size, rank),
        after=weights.matrix(after, n_draft, rank),
        mixer=mixer,
        rank=rank,
    )


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """Probability that a draft is accepted, from what its slot knew before it was drawn.

    Attributes:
        weight: Shape (H,) or (H + r,), float32.
        bias: Shape (), float32.
        with_markov: The second half reads W1 of the token before.
        temperatures: Divides the logit, one per slot; slots beyond keep 1.
    """

    weight: mx.array
    bias: mx.array
    with_markov: bool
    temperatures: tuple[float, ...] = ()

    def __call__(
        self, hidden: mx.array, embedded: mx.array | None, n_sequences: int = 1
    ) -> mx.array:
        """Confidence per slot: (K, H), (K, r) -> (K,) float32.

        Of several sequences each slot's rows stand together: (K * R, H) -> (K * R,).
        """
        x = hidden.astype(mx.float32)
        if self.with_markov and embedded is not None:
            x = mx.concatenate([x, embedded.astype(mx.float32)], axis=-1)
        logits = (x * self.weight).sum(axis=-1) + self.bias  # (K,)
        if self.temperatures:
            n = logits.shape[0] // n_sequences
            by_slot = mx.array([*self.temperatures, *[1.0] * n][:n])
            logits = logits / mx.repeat(by_slot, n_sequences)
        return mx.sigmoid(logits)


def load_confidence(
    weights: Weights,
    width: int,
    rank: int,
    *,
    name: str = "confidence_head.proj",
    temperatures: tuple[float, ...] = (),
) -> ConfidenceHead | None:
    """Take the confidence head if the checkpoint holds one; its width says what it reads.

    Args:
        weights: Where it is.
        width: H.
        rank: r of the Markov head, 0 without one.
        name: Base name of its tensors.
        temperatures: See `ConfidenceHead`.
    """
    if not weights.has(f"{name}.weight"):
        return None
    n_in = math.prod(weights.shape(f"{name}.weight"))
    with_markov = n_in != width
    n_in = width + rank if with_markov else width
    bias = mx.array(0.0)
    if weights.has(f"{name}.bias"):
        bias = weights.array(f"{name}.bias", (), dtype=mx.float32)
    weight = weights.array(f"{name}.weight", (n_in,), dtype=mx.float32)
    return ConfidenceHead(weight, bias, with_markov, temperatures)
