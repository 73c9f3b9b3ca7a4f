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


class KimiLinearFamily(RecurrentFamily):
    """kimi_linear: gated delta attention with a gate per channel, latent attention between."""

    def __init__(self) -> None:
        convolutions = ("q_conv.conv", "k_conv.conv", "v_conv.conv")
        super().__init__(Layout(), "self_attn", convolutions, GATED_DELTA)

    def prepare(self, model: Any) -> None:
        """Both preparations, each on its layers."""
        super().prepare(model)
        _prepare_attention(self.layers(model))


def _prepare_attention(layers: list[nn.Module]) -> None:
    for layer in layers:
        attention: Any = layer["self_attn"]
        for one in attention if isinstance(attention, list) else [attention]:
            if "embed_q" in one:
                attend_in_latent_space(one)


LATENT: dict[str, StackFamily] = {
    "deepseek_v3": LatentFamily(),
    "glm4_moe_lite": LatentFamily(),
    "kimi_k25": LatentFamily(Layout(owner="language_model")),
    "kimi_linear": KimiLinearFamily(),
    "kimi_vl": LatentFamily(Layout(owner="language_model")),
    "longcat_flash": LatentFamily(),
}
