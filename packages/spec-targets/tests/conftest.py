"""Tiny random models of the real mlx-lm classes."""

import json
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from spec_kernels import Installed
from spec_kernels.attention_layers import AttentionKernel, attention_function, wrap_attention
from spec_kernels.hardware import Device
from spec_kernels.layers import Switch
from spec_targets import MlxTarget, compiled, ragged
from spec_targets.families import FAMILIES
from spec_targets.tiny import build, tiny_config, tiny_model

CUDA = Device("cuda", "sm_90", "NVIDIA H200", "Linux 6.18")
NAME = "scaled_dot_product_attention"
PAD = 192  # one length for every attention, so that its sums are the same sums
FULL = ["full_attention"] * 3


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


@pytest.fixture
def attend_bound():
    """Stands in for what binds the CUDA attention kernel, with buffers as well."""

    def bound(self, q, k, causal):
        def attend(q, k, v, n_keys=None, fresh=()):
            if fresh:
                first = mx.array(n_keys).reshape(-1, 1) - q.shape[2]
                at = first + mx.arange(q.shape[2])  # (B or 1, T)
                at = mx.broadcast_to(at, (q.shape[0], q.shape[2]))[:, None, :, None]
                k, v = (
                    mx.put_along_axis(x, at, new, axis=2)
                    for x, new in zip((k, v), fresh, strict=True)
                )
            n = mx.array(k.shape[2] if n_keys is None else n_keys).reshape(-1, 1)
            k, v = (mx.pad(x, [(0, 0), (0, 0), (0, PAD - x.shape[2]), (0, 0)]) for x in (k, v))
            last = n - q.shape[2] + mx.arange(q.shape[2])  # (B or 1, T)
            seen = mx.arange(PAD) <= last[:, None, :, None]
            scale = float(self._scale)
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen)

        return attend

    return bound


@pytest.fixture
def serve(make_target, monkeypatch, attend_bound):
    """Makes a target whose attention goes to the stand-in, as on a CUDA device."""
    monkeypatch.setattr(compiled, "TRIED_AFTER", 3)
    monkeypatch.setattr(compiled, "AGAIN_AFTER", 3)
    monkeypatch.setattr(compiled, "RACED", 0)
    monkeypatch.setattr(compiled, "ROOM", 32)
    monkeypatch.setattr(compiled, "ROOM_EACH", 16)
    monkeypatch.setattr(KVCache, "step", 8)
    monkeypatch.setattr(ragged, "_STEP", 16)
    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", attend_bound)
    monkeypatch.setattr(
        "spec_kernels.attention_layers.attention_unsupported",
        lambda q, k, mask, where: "a mask of its own" if isinstance(mask, mx.array) else None,
    )

    def make(
        model_type, layer_types=FULL, *, graphs=True, queries=range(1, 17), gate=None, **fields
    ):
        target = make_target(model_type, layer_types=layer_types, **fields)
        switch, kernels, layers = Switch(16), {}, []
        for _, layer in target.model.named_modules():
            original = attention_function(layer, NAME)
            if original is not None:
                least = dict.fromkeys(queries, 4)
                kernel = kernels.setdefault(
                    original, AttentionKernel(original, least, switch, "cuda")
                )
                wrap_attention(layer, NAME, kernel)
                layers.append(layer)
        installed = Installed(switch, CUDA, "known", [], layers, [*kernels.values()], gate)
        target.use_kernels(installed, replay=graphs)
        return target

    return make
