"""What a model family must say about itself, so that nothing has to be guessed from attributes."""

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn


class Family(Protocol):
    """The parts of an mlx-lm model of one `model_type`.

    B is the batch (1), T rows, H the hidden size, V the vocabulary.
    """

    def backbone(self, model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Ids (B, T) to hidden states after the final norm (B, T, H); updates the cache."""
        ...

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Decoder layers in the order that tap ids count them; not a copy."""
        ...

    def embedding(self, model: nn.Module) -> nn.Module:
        """The token embedding table."""
        ...

    def norm(self, model: nn.Module, hidden: mx.array) -> mx.array:
        """The final norm, from the last layer's output."""
        ...

    def head(self, model: nn.Module, hidden: mx.array) -> mx.array:
        """Normed hidden states (.., H) to the model's own logits (.., V), transforms included."""
        ...

    def raw_head(self, model: nn.Module, hidden: mx.array) -> mx.array:
        """The same without multiplier or softcap."""
        ...
