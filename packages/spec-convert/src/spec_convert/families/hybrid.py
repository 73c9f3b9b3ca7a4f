"""Models that mix attention with a recurrence: Qwen 3.5, LFM 2, Nemotron-H.

Convolutions get back the axis that GGUF squeezes out, decays their logarithm, and the value heads
of Qwen 3.5 their order by key head.

References:
    llama.cpp, conversion rules of `Qwen3NextModel`, `LFM2Model`, `NemotronHModel`.
"""

from __future__ import annotations

from dataclasses import replace

from spec_convert.config import Config, base_config, positive
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families.llama import half_split_rows
from spec_convert.families.tables import ATTENTION, EXPERTS, MLP, QK_NORMS
from spec_convert.names import Architecture, Change, Shape, Slot
from spec_convert.orders import Half, Tiled

_QWEN35_TOP = {
    "token_embd": "language_model.model.embed_tokens",
    "output_norm": "language_model.model.norm",
    "output": "language_model.lm_head",
}
_QWEN35_LAYER = (
    ATTENTION
    | QK_NORMS
    | MLP
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
_QWEN35_EXPERTS = EXPERTS | {
    "ffn_gate_up_exps": "mlp.switch_mlp.gate_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _value_heads(facts: Facts, part: str) -> Tiled | None:
    """Order of the value heads in the rows (for `ssm_out`, the columns) of a tensor."""
    key_heads = facts.integer("ssm.group_count")
    value_heads = facts.integer("ssm.time_step_rank")
    if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
        raise ConvertError(
            f'[config] "{facts.key("ssm.time_step_rank")}" must be a multiple of '
            f'"{facts.key("ssm.group_count")}", got {value_heads} and {key_heads}.'
        )
    if value_heads == key_heads:
        return None
    width = facts.integer("ssm.inner_size") // value_heads
    skipped = 2 * key_heads * facts.integer("ssm.state_size")
    per_key = value_heads // key_heads
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return Tiled(skipped, key_heads, per_key, width)
    if part in ("attn_gate.weight", "ssm_out.weight"):
        return Tiled(0, key_heads, per_key, width)
    if part in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return Tiled(0, key_heads, per_key, 1)
    return None


def _qwen35_slot(slot: Slot, part: str, facts: Facts) -> Slot | tuple[Slot, ...]:
    order = _value_heads(facts, part)
    if part == "ssm_out.weight":
        return replace(slot, columns=order)
    slot = replace(slot, rows=order)
    if part == "ssm_conv1d.weight":
        return replace(slot, shape=Shape.TRAILING, packed=False)
    if part == "ssm_a":
        return replace(slot, change=Change.LOG_OF_NEGATIVE, shape=Shape.VECTOR)
    if part == "ssm_dt.bias":
        return replace(slot, shape=Shape.VECTOR)
    if part == "ffn_gate_inp_shexp.weight":
        return replace(slot, shape=Shape.ROW)
    if part == "ffn_gate_up_exps.weight":
        n_experts = facts.integer("expert_count")
        up = slot.name.replace("gate_proj", "up_proj")
        return (
            replace(slot, rows=Half(0, n_experts)),
            replace(slot, name=up, rows=Half(1, n_experts)),
        )
    return slot


def _qwen35_common(facts: Facts, model_type: str, architecture: str) -> Config:
    config = base_config(facts, model_type, architecture)
    config.pop("rope_scaling", None)
    value_heads = facts.integer("ssm.time_step_rank")
    sections = facts.metadata.integers(facts.key("rope.dimension_sections"))
    rotated = facts.integer("rope.dimension_count", config["head_dim"] // 4)
    name = "full_attention_interval"
    interval = positive(facts, name, facts.integer(name, 4))
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "linear_num_key_heads": facts.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_value_head_dim": facts.integer("ssm.inner_size") // max(1, value_heads),
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "full_attention_interval": interval,
        "layer_types": [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(facts.n_layers)
        ],
        "rope_parameters": {
            "type": "default",
            "mrope_section": (sections or [11, 11, 10])[:3],
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": rotated / config["head_dim"],
        },
    }


def _qwen35(facts: Facts) -> Config:
    return _qwen35_common(facts, "qwen3_5", "Qwen3_5ForCausalLM")


def _qwen35_moe(facts: Facts) -> Config:
    shared = facts.integer("expert_shared_feed_forward_length", 0)
    return _qwen35_common(facts, "qwen3_5_moe", "Qwen3_5MoeForCausalLM") | {
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": True,
    }


_LFM2_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
}
_LFM2_LAYER = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}


def _lfm2_slot(slot: Slot, part: str, facts: Facts) -> Slot:
    if part == "shortconv.conv.weight":
        return replace(slot, shape=Shape.TRAILING, packed=False)
    return slot


def _lfm2(facts: Facts) -> Config:
    config = base_config(facts, "lfm2", "Lfm2ForCausalLM")
    attention = [count > 0 for count in facts.per_layer("attention.head_count_kv")]
    width = config["intermediate_size"]
    return config | {
        "tie_word_embeddings": True,
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in facts.shapes),
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "block_dim": config["hidden_size"],
        "block_ff_dim": width,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [index for index, has in enumerate(attention) if has],
        "layer_types": ["full_attention" if has else "conv" for has in attention],
    }


_NEMOTRON_TOP = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_NEMOTRON_LAYER = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
}


_NEMOTRON_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.switch_mlp.fc1",
    "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def _nemotron_slot(slot: Slot, part: str, facts: Facts) -> Slot:
    if part == "ffn_gate_inp.weight":  # a bare matrix, not a layer that could be quantised
        return replace(slot, packed=False)
    if part == "ssm_conv1d.weight":
        return replace(slot, shape=Shape.TRAILING, packed=False)
    if part == "ssm_a":
        return replace(slot, change=Change.LOG_OF_NEGATIVE, shape=Shape.VECTOR)
    if part in ("ssm_d", "ssm_norm.weight", "ssm_dt.bias"):
        return replace(slot, shape=Shape.VECTOR)
    return half_split_rows(slot, part, facts)


def _nemotron_h(facts: Facts) -> Config:
    config = base_config(facts, "nemotron_h", "NemotronHForCausalLM")
    config.pop("rope_theta")
    kv_heads = facts.per_layer("attention.head_count_kv")
    widths = facts.per_layer("feed_forward_length")
    names = facts.shapes
    kinds = [
        "*"
        if kv_heads[index]
        else "E"
        if f"blk.{index}.ffn_gate_inp.weight" in names
        else "-"
        if widths[index]
        else "M"
        for index in range(facts.n_layers)
    ]
    mamba_heads = facts.integer("ssm.time_step_rank")
    return config | {
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "hybrid_override_pattern": "".join(kinds),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": facts.integer("ssm.inner_size") // max(1, mamba_heads),
        "ssm_state_size": facts.integer("ssm.state_size"),
        "conv_kernel": facts.integer("ssm.conv_kernel"),
        "n_groups": facts.integer("ssm.group_count"),
        "attention_bias": any(name.endswith("attn_q.bias") for name in names),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in names),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in names),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names),
        "use_bias": False,
    }


def _nemotron_h_moe(facts: Facts) -> Config:
    n_groups = facts.integer("expert_group_count", 1)
    used = facts.integer("expert_group_used_count", 1 if n_groups == 1 else None)
    latent = facts.integer("moe_latent_size", 0)
    return _nemotron_h(facts) | {
        "n_routed_experts": facts.integer("expert_count"),
        "n_shared_experts": facts.integer("expert_shared_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": latent or None,
        "n_group": n_groups,
        "topk_group": used,
        "norm_topk_prob": facts.metadata.flag(facts.key("expert_weights_norm"), True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


QWEN35 = Architecture(
    "qwen35",
    _QWEN35_TOP,
    _QWEN35_LAYER,
    config=_qwen35,
    adjust=_qwen35_slot,
    layers="language_model.model.layers",
    uniform=False,
)
QWEN35MOE = replace(
    QWEN35, name="qwen35moe", layer=_QWEN35_LAYER | _QWEN35_EXPERTS, config=_qwen35_moe
)
LFM2 = Architecture(
    "lfm2",
    _LFM2_TOP,
    _LFM2_LAYER,
    config=_lfm2,
    adjust=_lfm2_slot,
    uniform=False,
    dropped=frozenset({"output.weight"}),  # the model has no head of its own
)
NEMOTRON_H = Architecture(
    "nemotron_h",
    _NEMOTRON_TOP,
    _NEMOTRON_LAYER,
    config=_nemotron_h,
    adjust=_nemotron_slot,
    layers="backbone.layers",
    uniform=False,
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    layer=_NEMOTRON_LAYER | _NEMOTRON_EXPERTS,
    config=_nemotron_h_moe,
)
