"""Tiny random models of the real mlx-lm classes: for tests, and to measure without weights.

A model type is described by the fields of its config that differ from `_COMMON`; each class takes
the fields it knows. Knows nothing about targets.
"""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import MODEL_REMAPPING

WINDOW = 12
VOCAB = 61
_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_bias": False,
    "rope_scaling": None,
    "use_qk_norm": True,
    "mlp_bias": False,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window_pattern": 3,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 20.0,
    "logit_scale": 0.5,
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "partial_rotary_factor": 0.5,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_ctx": 512,
    "n_positions": 512,
    "n_inner": 48,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_GEMMA4 = {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    "tie_word_embeddings": True,
}
_GATED_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": True,
    "mamba_chunk_size": 8,
}
_SHORT_CONV = {
    "num_hidden_layers": 4,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_ff_dim": 48,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", _FULL, "conv", _FULL],
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": True, "qk_norm": True},
    "bailing_moe_linear": {"layer_group_size": 3, "group_norm_size": 2},
    "bailing_moe_v3": {"num_hidden_layers": 4},
    "dbrx": {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": {"type": "linear", "factor": 1.0}},
    "deepseek_v41": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_ratios": [0, 2, 4, 1, 1, 1],
        "kv_source_layer_ids": [1, 2, 3],
        "index_source_layer_ids": [1, 2, 3, 4],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 6,
        "gate_temp": 1.25,
        "swiglu_limit": 4.0,
    },
    "exaone": {"num_layers": 3, "tie_word_embeddings": True},
    "exaone4": {"rope_scaling": {"rope_type": "default"}, "sliding_window_pattern": "LLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "falcon_h1": _MAMBA,
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "rope_local_base_freq": 10000.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 4,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
    },
    "gemma4_text": _GEMMA4,
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "mamba", "attention"],
        "shared_intermediate_size": 24,
    },
    "gear": {"layer_types": ["conv_mixer", _SLIDING, "conv_mixer"], "conv_L_cache": 3},
    "gptj": {"rotary_dim": 8},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": {
        "linear_attn_config": {"kda_layers": [1, 2], "num_heads": 4, "head_dim": 8},
        "model_max_length": 512,
        "num_experts_per_token": 2,
    },
    "laguna": {"num_hidden_layers": 4, "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL]},
    "lfm2": _SHORT_CONV,
    "lfm2_moe": {**_SHORT_CONV, "use_expert_bias": True},
    "llama4_inner": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "num_layers": 3,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 2,
    },
    "mellum": {"rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 1.0,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 512}},
    "minimax": {"shared_intermediate_size": 24, "rotary_dim": 8},
    "ministral3": {
        "rope_parameters": {
            **_ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "num_hidden_layers": 5,
        "hybrid_override_pattern": ["M", "-", "*", "M", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 24,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "olmo_hybrid": {
        **_GATED_DELTA,
        "layer_types": ["linear_attention", "linear_attention", _FULL],
        "linear_allow_neg_eigval": True,
        "num_key_value_heads": 4,
    },
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 4],
        "num_kv_heads": [2, 2, 2],
        "ffn_multipliers": [1.0, 1.5, 2.0],
    },
    "phi3": {"num_key_value_heads": 4},
    "plamo": {"num_key_value_heads": 4, "n_shared_head": 2, "num_attention_heads": 8},
    "plamo2": {
        "mamba_num_heads": 4,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_step": 2,
        "hidden_size_per_head": 8,
        "mamba_enabled": True,
        "full_attention_idx": [],
    },
    "qwen": {"kv_channels": 8, "num_key_value_heads": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_5": {**_GATED_DELTA, "num_experts": 0},
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_next": {**_GATED_DELTA, "mlp_only_layers": [1]},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention", "recurrent"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
    "spark2_5": {"rope_parameters": {_SLIDING: _ROPE, _FULL: _ROPE}},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"num_attention_groups": 2, "moe_top_k": 2, "share_expert_dim": 24},
}
_TEXT_OF = {  # multimodal model type -> the text model inside
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4_inner",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def tiny_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """A config.json for a model of about 20,000 parameters.

    Args:
        model_type: As in a checkpoint.
        fields: Config fields to set, in the text model where there is one.
    """
    text_type = _TEXT_OF.get(model_type, model_type)
    config = {**_COMMON, **_SPECIAL.get(text_type, {}), **fields, "model_type": text_type}
    if model_type not in _TEXT_OF:
        return config
    return {"model_type": model_type, "text_config": config, "vocab_size": config["vocab_size"]}


def build(config: dict[str, Any], dtype: mx.Dtype = mx.float32, seed: int = 7) -> Any:
    """A random model for a config, in evaluation mode.

    Matrices are drawn wide, so that the arg-max changes from token to token.
    """
    model_type = config["model_type"]
    arch = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    mx.random.seed(seed)
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(config))
    drawn: list[tuple[str, mx.array]] = []
    parameters: list[tuple[str, Any]] = tree_flatten(model.parameters())  # pyright: ignore[reportAssignmentType]
    for name, value in parameters:
        if value.ndim > 1:
            spread = 0.3 if "emb" in name else 3.0  # a tied table must not just repeat its input
            value = spread * value.shape[-1] ** -0.5 * mx.random.normal(value.shape)
        drawn.append((name, value.astype(dtype)))
    model.update(tree_unflatten(drawn))  # pyright: ignore
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_model(model_type: str, dtype: mx.Dtype = mx.float32, **fields: Any) -> Any:
    """A tiny random model of a type; see `tiny_config` and `build`."""
    return build(tiny_config(model_type, **fields), dtype)
