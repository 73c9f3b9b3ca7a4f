"""Tiny random models of the real mlx-lm classes."""

from importlib import import_module

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from spec_targets import MlxTarget
from spec_targets.families import FAMILIES

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 61,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
_WINDOW = 12
CONFIGS = {
    "llama": {},
    "mistral": {
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {"num_key_value_heads": 4},
    "gemma3_text": {
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    },
    "gemma3": {},
}


def tiny_config(model_type: str) -> dict:
    config = {**_COMMON, **CONFIGS[model_type], "model_type": model_type}
    if model_type == "gemma3":
        text = {**_COMMON, **CONFIGS["gemma3_text"], "model_type": "gemma3_text"}
        config = {"model_type": "gemma3", "text_config": text, "vocab_size": text["vocab_size"]}
    return config


def tiny_model(model_type: str, dtype: mx.Dtype = mx.float32):
    config = tiny_config(model_type)
    arch = import_module(f"mlx_lm.models.{'llama' if model_type == 'mistral' else model_type}")
    mx.random.seed(7)
    model = arch.Model(arch.ModelArgs.from_dict(config))
    # Wide weights, so that the arg-max changes from token to token.
    model.update(tree_map(lambda p: (p * 3 if p.ndim > 1 else p).astype(dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


@pytest.fixture(params=sorted(CONFIGS))
def model_type(request) -> str:
    return request.param


@pytest.fixture
def make_model():
    return tiny_model


@pytest.fixture
def make_target():
    def make(model_type: str, dtype: mx.Dtype = mx.float32) -> MlxTarget:
        model = tiny_model(model_type, dtype)
        return MlxTarget(model, FAMILIES[model_type], model_type, 512, n_heads=4)

    return make
