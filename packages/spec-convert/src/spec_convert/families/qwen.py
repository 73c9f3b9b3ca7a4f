"""Qwen 2 and 3, dense and with experts: names only, nothing is reordered."""

from __future__ import annotations

from spec_convert.config import Config, base_config
from spec_convert.facts import Facts
from spec_convert.families.tables import DENSE, EXPERTS, QK_NORMS, TOP
from spec_convert.names import Architecture


def _qwen2(facts: Facts) -> Config:
    return base_config(facts, "qwen2", "Qwen2ForCausalLM") | {"hidden_act": "silu"}


def _qwen3(facts: Facts) -> Config:
    config = base_config(facts, "qwen3", "Qwen3ForCausalLM")
    return config | {"hidden_act": "silu", "attention_bias": False}


def _qwen3_moe(facts: Facts) -> Config:
    config = base_config(facts, "qwen3_moe", "Qwen3MoeForCausalLM")
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


QWEN2 = Architecture("qwen2", TOP, DENSE, config=_qwen2)
QWEN3 = Architecture("qwen3", TOP, DENSE | QK_NORMS, config=_qwen3)
QWEN3MOE = Architecture("qwen3moe", TOP, DENSE | QK_NORMS | EXPERTS, config=_qwen3_moe)
