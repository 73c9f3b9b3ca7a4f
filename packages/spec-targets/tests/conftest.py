"""Tiny random models of the real mlx-lm classes."""

import json
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from spec_targets import MlxTarget
from spec_targets.families import FAMILIES
from spec_targets.tiny import build, tiny_config, tiny_model


@pytest.fixture
def make_model():
    return tiny_model


@pytest.fixture
def make_target():
    def make(
        model_type: str, dtype: mx.Dtype = mx.float32, kv_bits: int | None = None, **fields: Any
    ) -> MlxTarget:
        model = tiny_model(model_type, dtype, **fields)
        family = FAMILIES["llama" if model_type == "mistral" else model_type]
        return MlxTarget(model, family, model_type, 512, n_heads=4, kv_bits=kv_bits)

    return make


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder with a tiny model; its tokenizer is not what these tests are about."""
    monkeypatch.setattr("spec_targets.load._load_tokenizer", lambda *_: SimpleNamespace())

    def write(model_type="qwen3", extra=None, weights=True, **fields):
        config = tiny_config(model_type, **fields)
        if weights:
            model = build(config)
            parameters = dict(tree_flatten(model.parameters()))
            mx.save_safetensors(str(tmp_path / "model.safetensors"), parameters)
        (tmp_path / "config.json").write_text(json.dumps({**config, **(extra or {})}))
        return tmp_path

    return write
