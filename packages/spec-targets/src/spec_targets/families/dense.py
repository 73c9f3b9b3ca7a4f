"""Families built like llama: `model.model.{embed_tokens, layers, norm}` and a tied or own head."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class DenseFamily:
    """llama, mistral, qwen2, qwen3, phi3."""

    def backbone(self, model: Any, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Ids (B, T) to hidden states after the final norm (B, T, H)."""
        return model.model(tokens, cache)

    def layers(self, model: Any) -> list[nn.Module]:
        """Decoder layers."""
        return model.model.layers

    def embedding(self, model: Any) -> nn.Module:
        """The token embedding table."""
        return model.model.embed_tokens

    def norm(self, model: Any, hidden: mx.array) -> mx.array:
        """The final norm."""
        return model.model.norm(hidden)

    def tied(self, model: Any) -> bool:
        """True when the embedding table is the head as well."""
        return model.args.tie_word_embeddings

    def raw_head(self, model: Any, hidden: mx.array) -> mx.array:
        """Logits without any transform."""
        if self.tied(model):
            return model.model.embed_tokens.as_linear(hidden)
        return model.lm_head(hidden)

    def head(self, model: Any, hidden: mx.array) -> mx.array:
        """The model's logits; these families transform nothing."""
        return self.raw_head(model, hidden)
