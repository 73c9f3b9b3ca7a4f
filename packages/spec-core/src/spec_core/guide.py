"""What a request may add to the target's logits: a grammar, or a bias on chosen tokens.

A guide is part of the distribution that is reproduced: drafts are accepted against the guided
logits, so structured output is as lossless under speculation as without it.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class Guide(Protocol):
    """Bound to one sequence."""

    @property
    def fixed(self) -> bool:
        """True when the bias is the same at every position; plain steps are then pipelined."""
        ...

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """What to add to the logits of a block; -inf forbids a token. Changes nothing.

        Args:
            drafts: d1..dK; empty from a fixed guide's caller.

        Returns:
            Shape (K + 1, V), or (1, V) where all rows are the same; float32. At least one token of
            each row stays possible; rows after a forbidden draft are never used.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the emitted tokens of a round."""
        ...


class TokenBias:
    """A fixed bias on chosen tokens.

    Args:
        biases: Token id -> number added to its logit.
        vocab_size: V.

    Raises:
        ValueError: an id is outside the vocabulary, or a bias is NaN or infinity (-inf forbids).
    """

    fixed = True

    def __init__(self, biases: dict[int, float], vocab_size: int) -> None:
        wrong = next((t for t in biases if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"[bias] Token ids must be in 0..{vocab_size - 1}, got {wrong}.")
        endless = next((b for b in biases.values() if not b < math.inf), None)
        if endless is not None:
            raise ValueError(f"[bias] Biases must be numbers or -inf, got {endless}.")
        row = mx.zeros((vocab_size,))
        if biases:
            row[mx.array(list(biases), mx.int32)] = mx.array(list(biases.values()), mx.float32)
        self._row = row[None]

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """The same row for every position, (1, V)."""
        return self._row

    def advance(self, tokens: Sequence[int]) -> None:
        """Nothing to follow."""
