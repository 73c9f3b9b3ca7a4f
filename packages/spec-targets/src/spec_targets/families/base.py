"""What a model family must say about itself, so that nothing has to be guessed from attributes."""

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class Family(Protocol):
    """The parts of an mlx-lm model of one `model_type`.

    T rows, H the hidden size, V the vocabulary.
    """

    def backbone(self, model: Any) -> nn.Module:
        """The module that turns ids into hidden states after the final norm, (B, T, H)."""
        ...

    def layers(self, model: Any) -> list[nn.Module]:
        """Decoder layer objects in the order they run; not a copy."""
        ...

    def n_loops(self, model: Any) -> int:
        """How often one forward runs all layers; 1 but for looped models."""
        ...

    def between_loops(self, model: Any, hidden: mx.array) -> mx.array:
        """What enters the next loop, from the last layer's output; the same but for some models."""
        ...

    def embedding(self, model: Any) -> nn.Module:
        """The token embedding table."""
        ...

    def stream(self, result: Any) -> mx.array:
        """What a tap reads out of what a layer returns, (B, T, H)."""
        ...

    def norm(self, model: Any, hidden: mx.array) -> mx.array:
        """The final norm."""
        ...

    def final(self, model: Any, result: Any) -> mx.array:
        """The backbone's output from what the last layer returns."""
        ...

    def raw_head(self, model: Any, hidden: mx.array) -> mx.array:
        """Normed hidden states (.., H) to logits (.., V), without multiplier or softcap."""
        ...

    def prepare(self, model: Any) -> None:
        """Make the model's few-row forward equal its one-row forward, where it does not already."""
        ...
