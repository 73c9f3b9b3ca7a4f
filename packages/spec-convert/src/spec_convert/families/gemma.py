"""Gemma 2, 3 and 4.

Gemma 2 and 3 keep norms as offsets from one and GGUF adds the one; Gemma 4 does not. What no file
states (how many layers share a global one, the rope base of local layers) is the same for every
model of a generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spec_convert.config import Config, base_config
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families.tables import ATTENTION, MLP, QK_NORMS, TOP
from spec_convert.names import Architecture, Change, Slot
from spec_convert.orders import Half

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = ATTENTION | MLP | _NORMS
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6
_LOCAL_ROPE_THETA = 10_000.0


def _norms_without_offset(slot: Slot, part: str, facts: Facts) -> Slot:
    is_norm = part.endswith("norm.weight")
    return replace(slot, change=Change.MINUS_ONE) if is_norm else slot


def _query_scalar(config: Config, largest: int) -> int:
    if config["num_hidden_layers"] == largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _layer_types(n_layers: int, pattern: int) -> list[str]:
    kinds = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    return [kinds[index % pattern] for index in range(n_layers)]


def _gemma2(facts: Facts) -> Config:
    config = base_config(facts, "gemma2", "Gemma2ForCausalLM")
    return config | {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, _GEMMA2_27B_LAYERS),
        "sliding_window": facts.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(config["num_hidden_layers"], 2),
    }


def _gemma3(facts: Facts) -> Config:
    config = base_config(facts, "gemma3_text", "Gemma3ForCausalLM")
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.integer("attention.sliding_window"),
        "sliding_window_pattern": _GEMMA3_PATTERN,
        "layer_types": _layer_types(config["num_hidden_layers"], _GEMMA3_PATTERN),
        "rope_local_base_freq": _LOCAL_ROPE_THETA,
        "query_pre_attn_scalar": _query_scalar(config, _GEMMA3_27B_LAYERS),
    }


_GEMMA4_TOP = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4_LAYER: Mapping[str, str] = (
    _LAYER
    | QK_NORMS
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_down_exps": "experts.switch_glu.down_proj",
        "ffn_gate_up_exps": "experts.switch_glu.gate_proj",
        "ffn_gate_exps": "experts.switch_glu.gate_proj",
        "ffn_up_exps": "experts.switch_glu.up_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }
)


def _gemma4_slot(slot: Slot, part: str, facts: Facts) -> Slot | tuple[Slot, ...]:
    if part == "per_layer_token_embd.weight":
        return replace(slot, embedding=True)
    if part == "ffn_gate_up_exps.weight":
        n_experts = facts.integer("expert_count")
        up = slot.name.replace("gate_proj", "up_proj")
        return (
            replace(slot, rows=Half(0, n_experts)),
            replace(slot, name=up, rows=Half(1, n_experts)),
        )
    return slot


def _gemma4(facts: Facts) -> Config:
    sliding = facts.metadata.flags(facts.key("attention.sliding_window_pattern"))
    n_layers = facts.n_layers
    if len(sliding) < n_layers:
        raise ConvertError(
            f'[config] "{facts.key("attention.sliding_window_pattern")}" must have {n_layers} '
            f"entries, got {len(sliding)}. Use a file written by a current converter."
        )
    sliding = sliding[:n_layers]
    widths = facts.per_layer("feed_forward_length")
    kv_heads = facts.per_layer("attention.head_count_kv")
    local = [kv_heads[i] for i in range(n_layers) if sliding[i]] or kv_heads
    whole = [kv_heads[i] for i in range(n_layers) if not sliding[i]] or kv_heads
    config = {
        **_gemma4_base(facts),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": local[0],
        "num_kv_shared_layers": facts.integer("attention.shared_kv_layers", 0),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": facts.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": facts.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "attention_k_eq_v": any(
            f"blk.{i}.attn_k.weight" in facts.shapes
            and f"blk.{i}.attn_v.weight" not in facts.shapes
            for i in range(n_layers)
        ),
        "num_global_key_value_heads": whole[0],
    }
    per_layer = facts.shapes.get("per_layer_token_embd.weight")
    config["vocab_size_per_layer_input"] = per_layer[0] if per_layer else config["vocab_size"]
    return config | _gemma4_experts(facts)


def _gemma4_base(facts: Facts) -> Config:
    whole = facts.integer("attention.key_length")
    config = base_config(facts, "gemma4_text", "Gemma4ForCausalLM")
    theta = config.pop("rope_theta")
    rotated = 0.25
    if "rope_freqs.weight" in facts.shapes:
        factors = facts.vector("rope_freqs.weight")
        rotated = sum(1 for factor in factors if factor < 1e29) / len(factors)
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": facts.integer("attention.key_length_swa", whole),
        "global_head_dim": whole,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": rotated,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", _LOCAL_ROPE_THETA),
            },
        },
    }


def _gemma4_experts(facts: Facts) -> Config:
    n_experts = facts.integer("expert_count", 0)
    if not n_experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": n_experts,
        "top_k_experts": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
    }


GEMMA2 = Architecture(
    "gemma2",
    TOP,
    _LAYER,
    config=_gemma2,
    adjust=_norms_without_offset,
    dropped=frozenset({"output.weight"}),  # the model has no head of its own
)
GEMMA3 = Architecture(
    "gemma3", TOP, _LAYER | QK_NORMS, config=_gemma3, adjust=_norms_without_offset
)
GEMMA4 = Architecture(
    "gemma4",
    _GEMMA4_TOP,
    _GEMMA4_LAYER,
    config=_gemma4,
    adjust=_gemma4_slot,
    uniform=False,
    dropped=frozenset({"rope_freqs.weight"}),
)
