"""Attention of a block where the fused operation would plan anew for every length."""

import mlx.core as mx
import pytest

from spec_drafters import _layers


@pytest.mark.parametrize("kind", ["none", "folded", "causal", "bool"])
def test_plain_operations_give_what_the_fused_one_gives(kind, monkeypatch):
    q = mx.random.normal((1, 6, 5, 16), key=mx.random.key(0))
    k = mx.random.normal((1, 2, 23, 16), key=mx.random.key(1))
    v = mx.random.normal((1, 2, 23, 16), key=mx.random.key(2))
    seen = mx.random.uniform(shape=(5, 23), key=mx.random.key(3)) > 0.5
    mask = {"causal": "causal", "bool": seen}.get(kind)
    fused = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    monkeypatch.setattr(_layers, "plans_by_length", lambda: True)
    monkeypatch.setattr(_layers, "_FOLDED", q.size * 23 if kind == "folded" else 0)
    plain = _layers._attention(q, k, v, 0.25, mask, None)
    assert plain.shape == fused.shape
    assert mx.allclose(plain, fused, atol=1e-5)
