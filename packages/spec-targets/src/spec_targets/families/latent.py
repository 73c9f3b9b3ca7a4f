"""Families with multi-head latent attention whose one-row form differs from the wider one."""

from typing import Any

import mlx.nn as nn

from spec_targets.families.layout import Layout, StackFamily
from spec_targets.families.recurrent import RecurrentFamily
from spec_targets.latent import attend_in_latent_space
from spec_targets.recurrent import GATED_DELTA


class LatentFamily(StackFamily):
    """A stack with latent attention in every layer, as `self_attn` (one module, or several)."""

    def prepare(self, model: Any) -> None:
        """Let few rows attend as one row does."""
        _prepare_attention(self.layers(model))


class DeltaLatentFamily(RecurrentFamily):
    """Gated delta attention with a gate per channel, and latent attention between.

    Args:
        layout: Where its parts are.
        attention: Name of either kind of attention in a layer.
        convolutions: Paths of the convolutions in the recurrent kind.
    """

    def __init__(self, layout: Layout, attention: str, convolutions: tuple[str, ...]) -> None:
        super().__init__(layout, attention, convolutions, GATED_DELTA)
        self._attention = attention

    def prepare(self, model: Any) -> None:
        """Both preparations, each on its layers."""
        super().prepare(model)
        _prepare_attention(self.layers(model), self._attention)


def _prepare_attention(layers: list[nn.Module], name: str = "self_attn") -> None:
    for layer in layers:
        attention: Any = layer[name]
        for one in attention if isinstance(attention, list) else [attention]:
            if "embed_q" in one:
                attend_in_latent_space(one)


LATENT: dict[str, StackFamily] = {
    "bailing_moe_v3": DeltaLatentFamily(
        Layout(embedding="word_embeddings"), "attention", ("q_conv1d", "k_conv1d", "v_conv1d")
    ),
    "deepseek_v3": LatentFamily(),
    "glm4_moe_lite": LatentFamily(),
    "kimi_k25": LatentFamily(Layout(owner="language_model")),
    "kimi_linear": DeltaLatentFamily(
        Layout(), "self_attn", ("q_conv.conv", "k_conv.conv", "v_conv.conv")
    ),
    "kimi_vl": LatentFamily(Layout(owner="language_model")),
    "longcat_flash": LatentFamily(),
}
