"""Llama, Mistral, Mixtral: rotary rows stored interleaved, Llama 3 frequency factors as a tensor.

References:
    llama.cpp, conversion rules of `LlamaModel`; Hugging Face `modeling_rope_utils`, "llama3".
"""

from __future__ import annotations

import math
from dataclasses import replace

from spec_convert.config import Config, base_config
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families.tables import DENSE, EXPERTS, TOP
from spec_convert.names import Architecture, Slot
from spec_convert.orders import Interleaved

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def half_split_rows(slot: Slot, part: str, facts: Facts) -> Slot:
    """Query and key rows return to half-split order, weights and biases alike."""
    stem = part.rpartition(".")[0]
    if stem not in ("attn_q", "attn_k"):
        return slot
    heads = facts.any_layer("attention.head_count")
    if stem == "attn_k":
        heads = facts.any_layer("attention.head_count_kv", heads)
    return replace(slot, rows=Interleaved(heads))


def llama3_scaling(facts: Facts, head_dim: int, theta: float) -> Config:
    """`rope_scaling` of Llama 3, recovered from the stored frequency factors.

    Llama 3 divides low frequencies by a factor and fades between two wavelengths; only the
    quotients are stored. The factor is the largest quotient, the rest is Llama 3's own choice and
    is checked against every stored number.

    Raises:
        ConvertError: the numbers do not follow that rule.
    """
    if "rope_freqs.weight" not in facts.shapes:
        return {}
    stored = facts.vector("rope_freqs.weight")
    factor = float(f"{max(stored):.6g}")
    for index, got in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(max(smooth, 0.0), 1.0)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if len(stored) != head_dim // 2 or abs(got - wanted) > 1e-4 * wanted:
            raise ConvertError(
                '[config] "rope_freqs.weight" must follow the Llama 3 rule, '
                f"got {got:g} instead of {wanted:g} at {index}. Use --raw-names."
            )
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    return {"rope_scaling": scaling}


_MIXTRAL_EXPERTS = {
    name: target.replace("mlp.", "block_sparse_moe.", 1) for name, target in EXPERTS.items()
}


def _config(facts: Facts) -> Config:
    if facts.integer("expert_count", 0):
        return _mixtral_config(facts)
    config = base_config(facts, "llama", "LlamaForCausalLM")
    return config | {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in facts.shapes,
        **llama3_scaling(facts, config["head_dim"], config["rope_theta"]),
    }


def _mixtral_config(facts: Facts) -> Config:
    """Mixtral: a Llama with experts; MLX knows it without rope scaling and with plain heads."""
    config = base_config(facts, "mixtral", "MixtralForCausalLM")
    heads, head_dim = config["num_attention_heads"], config.pop("head_dim")
    scaled = "rope_scaling" in config or "rope_freqs.weight" in facts.shapes
    if scaled or heads * head_dim != config["hidden_size"]:
        raise ConvertError(
            "[config] A Llama with experts must be a Mixtral: no rope scaling, and heads as wide "
            f"as the model, got {heads} heads of {head_dim} for {config['hidden_size']}"
            f"{' and rope scaling' if scaled else ''}. Use --raw-names."
        )
    return config | {
        "hidden_act": "silu",
        "num_local_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
    }


def _mistral3_config(facts: Facts) -> Config:
    """Ministral 3: attention is scaled with the position; the rope is yarn."""
    config = base_config(facts, "ministral3", "Ministral3ForCausalLM")
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    return config | {
        "hidden_act": "silu",
        "rope_parameters": {
            **scaling,
            "rope_theta": config.pop("rope_theta"),
            "llama_4_scaling_beta": facts.number("attention.temperature_scale", 0.0),
        },
    }


LLAMA = Architecture(
    "llama",
    TOP,
    DENSE | _MIXTRAL_EXPERTS,
    config=_config,
    adjust=half_split_rows,
    dropped=frozenset({"rope_freqs.weight"}),
)
MISTRAL3 = replace(LLAMA, name="mistral3", layer=DENSE, config=_mistral3_config)
