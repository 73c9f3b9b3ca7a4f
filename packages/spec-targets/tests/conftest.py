"""Tiny random models of the real mlx-lm classes."""

from typing import Any

import mlx.core as mx
import pytest

from spec_targets import MlxTarget
from spec_targets.families import FAMILIES
from spec_targets.tiny import tiny_model


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
