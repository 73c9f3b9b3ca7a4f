"""Gemma 3: sliding windows on five of six layers, a scaled embedding, a head tied at load.

The scale of the embedding is applied inside the backbone, so the raw table stays unscaled.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_targets.families.dense import DenseFamily


class Gemma3TextFamily(DenseFamily):
    """model_type "gemma3_text"."""

    def tied(self, model: Any) -> bool:
        """Decided by mlx-lm from the checkpoint: tied when it holds no head."""
        return model.tie_word_embeddings


class Gemma3Family:
    """model_type "gemma3": the text model inside a multimodal checkpoint."""

    _text = Gemma3TextFamily()

    def backbone(self, model: Any, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Ids (B, T) to hidden states after the final norm (B, T, H)."""
        return self._text.backbone(model.language_model, tokens, cache)

    def layers(self, model: Any) -> list[nn.Module]:
        """Decoder layers."""
        return self._text.layers(model.language_model)

    def embedding(self, model: Any) -> nn.Module:
        """The token embedding table."""
        return self._text.embedding(model.language_model)

    def norm(self, model: Any, hidden: mx.array) -> mx.array:
        """The final norm."""
        return self._text.norm(model.language_model, hidden)

    def raw_head(self, model: Any, hidden: mx.array) -> mx.array:
        """Logits without any transform."""
        return self._text.raw_head(model.language_model, hidden)

    def head(self, model: Any, hidden: mx.array) -> mx.array:
        """The model's logits."""
        return self._text.head(model.language_model, hidden)
