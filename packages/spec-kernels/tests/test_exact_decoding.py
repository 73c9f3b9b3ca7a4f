"""A whole, tiny model on emulated Metal kernels: blocks decode to the bits of single steps."""

import metal_emulator
import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_kernels import _build, install, installation
from spec_kernels.hardware import Device

M4 = Device("metal", "applegpu_g16s", "Apple M4 Max", "Darwin 26.1")
HIDDEN, DEPTH, VOCABULARY = 128, 64, 96


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class Cache:
    """Keys and values of one layer, as long as the tokens kept so far."""

    def __init__(self):
        self.keys = self.values = mx.zeros((1, 1, 0, DEPTH), mx.bfloat16)

    def update(self, keys, values):
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        self.values = mx.concatenate([self.values, values], axis=2)
        return self.keys, self.values

    def trim(self, count):
        kept = self.keys.shape[2] - count
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, 2 * DEPTH, bias=False)
        self.k_proj = nn.Linear(HIDDEN, DEPTH, bias=False)
        self.v_proj = nn.Linear(HIDDEN, DEPTH, bias=False)
        self.o_proj = nn.Linear(2 * DEPTH, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def __call__(self, x, cache):
        h, length = self.norm(x), x.shape[1]
        q = self.q_proj(h).reshape(1, length, 2, DEPTH).transpose(0, 2, 1, 3)
        k, v = cache.update(self.k_proj(h)[:, None], self.v_proj(h)[:, None])
        mask = "causal" if length > 1 else None
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=DEPTH**-0.5, mask=mask)
        return x + self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, length, 2 * DEPTH))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = [Layer()]
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def __call__(self, ids, caches):
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.head(x)


@pytest.fixture
def model(emulator, monkeypatch):
    mx.random.seed(5)
    made = Model()
    made.set_dtype(mx.bfloat16)
    nn.quantize(made, group_size=64, bits=4, class_predicate=lambda _, m: type(m) is nn.Linear)
    monkeypatch.setattr(installation, "this_device", lambda: M4)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    _build.metal_kernel.cache_clear()
    yield made
    _build.metal_kernel.cache_clear()


def test_blocks_with_rejected_drafts_give_the_bits_of_plain_decoding(model):
    with install(model, exact=True) as installed:
        caches, ids, logits = [Cache()], [7], []
        for _ in range(9):
            logits.append(model(mx.array([[ids[-1]]]), caches)[0, -1])
            ids.append(int(mx.argmax(logits[-1])))
        caches, at = [Cache()], 0
        for width, right in ((1, 1), (5, 3), (2, 2), (4, 3)):
            block = ids[at : at + right] + [3] * (width - right)
            rows = model(mx.array([block]), caches)[0]
            for i in range(right):
                assert mx.array_equal(rows[i], logits[at + i]), (at, i)
            for cache in caches:
                cache.trim(width - right)
            at += right
        assert at == 9
        calls = installed.report().calls
    assert calls == {"matmul metal": 13 * 5, "attention metal": 13}
