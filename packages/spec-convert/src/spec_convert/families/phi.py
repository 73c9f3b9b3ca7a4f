"""Phi 3 and 4: fused projections, longrope factors as tensors."""

from __future__ import annotations

from spec_convert.config import Config, base_config
from spec_convert.facts import Facts
from spec_convert.families.tables import TOP
from spec_convert.names import Architecture

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def _config(facts: Facts) -> Config:
    config = base_config(facts, "phi3", "Phi3ForCausalLM")
    original = facts.integer("rope.scaling.original_context_length", 4096)
    config |= {
        "hidden_act": "silu",
        "original_max_position_embeddings": original,
        "partial_rotary_factor": facts.integer("rope.dimension_count", config["head_dim"])
        / config["head_dim"],
    }
    window = facts.integer("attention.sliding_window", 0)
    if window:
        config["sliding_window"] = window
    if _FACTORS[0] in facts.shapes:
        long, short = (facts.vector(name) for name in _FACTORS)
        config["rope_scaling"] = {"type": "longrope", "long_factor": long, "short_factor": short}
    return config


PHI3 = Architecture("phi3", TOP, _LAYER, config=_config, dropped=frozenset(_FACTORS))
