"""Random accepts and rejects against plain mlx-lm: a model of its own, its own caches, row by row.

Nothing of this package runs on the reference side, except the window cache: the library's ring
sums in another order once it is full, which changes the last bits.
"""

import copy
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from spec_core import LoadError
from spec_targets import MlxTarget, recurrent
from spec_targets.families import Layout
from spec_targets.families.recurrent import RecurrentFamily
from spec_targets.rollback import replace_entry, rollback_for
from spec_targets.tiny import VOCAB
from spec_targets.window import WindowCache

KINDS = {
    "trim": "qwen3",
    "chunked": "llama4",
    "window": "gemma3_text",
    "window with sinks and experts": "gpt_oss",
    "gated delta": "qwen3_5",
    "gated delta with experts": "qwen3_next",
    "gated delta with three convolutions": "olmo_hybrid",
    "mamba-2": "mamba2",
    "mamba-2 with experts and attention": "nemotron_h",
    "mamba-2 beside attention in one layer": "falcon_h1",
    "latent attention": "deepseek_v3",
    "latent attention, twice a layer": "longcat_flash",
    "latent attention and gated delta": "kimi_linear",
    "gated delta per channel and latent attention": "bailing_moe_v3",
    "whole layers again": "rwkv7",
    "whole layers again, beside windows": "recurrent_gemma",
    "whole layers again, beside experts": "jamba",
    "short convolution": "lfm2",
    "short convolution with experts": "lfm2_moe",
}


PACKED = {  # model type and bits; the heads are 32 channels wide
    "packed": ("qwen3", 8),
    "packed in 4 bits, with windows": ("gemma3_text", 4),
    "packed, with gated delta": ("qwen3_5", 8),
    "packed in 4 bits, looped": ("nanbeige", 4),
}
WIDE = {"head_dim": 32}


class Reference:
    """Plain mlx-lm, one row at a time after the same prefill chunks."""

    def __init__(self, model, kv_bits):
        self.model = model
        self.entries = make_prompt_cache(model)
        for idx, entry in enumerate(self.entries):
            if type(entry) is RotatingKVCache:
                self.entries[idx] = WindowCache(entry.max_size)
            if type(entry) is KVCache and kv_bits is not None:
                self.entries[idx] = QuantizedKVCache(group_size=32, bits=kv_bits)

    def prefill(self, tokens):
        self.model(mx.array([tokens]), cache=self.entries)

    def step(self, token):
        return self.model(mx.array([[token]]), cache=self.entries)[0]

    def peek(self, tokens):
        """Logits of rows that will not be kept."""
        ahead = copy.copy(self)
        ahead.entries = copy.deepcopy(self.entries)
        return [ahead.step(token) for token in tokens]


def contents(entry):
    """What a cache entry stands for, as arrays."""
    if isinstance(entry, CacheList):
        return [array for one in entry.caches for array in contents(one)]
    if isinstance(entry, WindowCache):
        rows = slice(max(0, entry._n - entry.window + 1), entry._n)
        return [entry.keys[..., rows, :], entry.values[..., rows, :]]
    if isinstance(entry, QuantizedKVCache):
        return [array for packed in entry.keys_and_values() for array in packed]
    if isinstance(entry, KVCache):
        return [entry.keys[..., : entry.offset, :], entry.values[..., : entry.offset, :]]
    if isinstance(entry, ChunkedKVCache):  # drops what is older than a chunk now and then
        return [rows[..., -entry.chunk_size :, :] for rows in entry.keys_and_values()]
    return list(entry.cache)


def follow(target, model, *, n_rounds, max_block=7, seed=0, taps=()):
    """Play random rounds on the target; compare logits and state with the reference each time."""
    rng = random.Random(seed)
    reference, cache = Reference(model, target.kv_bits), target.make_cache()
    prompt = [rng.randrange(VOCAB) for _ in range(60)]
    for start in range(0, len(prompt), 30):  # a chunk edge inside the prompt, past the window
        reference.prefill(prompt[start : start + 30])
        target.prefill(prompt[start : start + 30], cache)
    n_committed = len(prompt)
    for n_round in range(n_rounds):
        block = [rng.randrange(VOCAB) for _ in range(rng.randint(1, max_block))]
        n_keep = (0, 1, len(block), rng.randint(0, len(block)))[n_round % 4]
        output = target.verify(mx.array(block), cache, taps=taps)
        want = [reference.step(token) for token in block[:n_keep]]
        want += reference.peek(block[n_keep:])
        where = f"round {n_round}: {n_keep} of {len(block)} rows kept"
        assert mx.array_equal(output.logits, mx.concatenate(want)), f"logits, {where}"
        target.commit(cache, n_keep)
        n_committed += n_keep
        assert cache.offset == n_committed
        for idx, (got, own) in enumerate(zip(cache.entries, reference.entries, strict=True)):
            for a, b in zip(contents(got), contents(own), strict=True):
                assert mx.array_equal(a, b), f"state of entry {idx}, {where}"


def test_a_window_that_cannot_be_reproduced_is_refused():
    entry = replace_entry(RotatingKVCache(max_size=8, keep=4))  # keeps the first four rows for ever
    with pytest.raises(LoadError, match='Layer 5 keeps a RotatingKVCache, which family "odd"'):
        rollback_for(entry, 5, "odd")


@pytest.mark.parametrize("kind", KINDS)
def test_any_rejects_leave_the_state_of_plain_steps(make_target, make_model, kind):
    follow(make_target(KINDS[kind]), make_model(KINDS[kind]), n_rounds=16, taps=(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_rounds_leave_the_state_of_plain_steps(make_target, make_model, kind):
    target, model = make_target(KINDS[kind]), make_model(KINDS[kind])
    follow(target, model, n_rounds=200, max_block=9, seed=1)


@pytest.mark.parametrize("model_type", ["qwen3_5", "olmo_hybrid", "mamba2"])
def test_states_too_large_to_hold_are_computed_again(
    make_target, make_model, monkeypatch, model_type
):
    monkeypatch.setattr(recurrent, "_MOST_STATE_BYTES", 0)
    follow(make_target(model_type), make_model(model_type), n_rounds=16, seed=3)


def test_a_recurrence_that_takes_all_rows_at_once_is_run_again(make_model):
    at_once = replace(recurrent.GATED_DELTA, takes_rows=lambda: False)  # as on Metal
    family = RecurrentFamily(Layout(owner="language_model"), "linear_attn", recurrence=at_once)
    target = MlxTarget(make_model("qwen3_5"), family, "qwen3_5", n_heads=4)
    follow(target, make_model("qwen3_5"), n_rounds=16, seed=4)


@pytest.mark.parametrize("kind", PACKED)
def test_any_rejects_leave_the_packed_state_of_plain_steps(make_target, make_model, kind):
    model_type, bits = PACKED[kind]
    target = make_target(model_type, kv_bits=bits, **WIDE)
    follow(target, make_model(model_type, **WIDE), n_rounds=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_two_hundred_rounds_leave_the_packed_state_of_plain_steps(make_target, make_model, kind):
    model_type, bits = PACKED[kind]
    target = make_target(model_type, kv_bits=bits, **WIDE)
    follow(target, make_model(model_type, **WIDE), n_rounds=200, max_block=9, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "qwen3_5", "mamba2", "lfm2"])
def test_bfloat16_is_exact_where_the_ops_are(make_target, make_model, model_type):
    target = make_target(model_type, mx.bfloat16)
    follow(target, make_model(model_type, mx.bfloat16), n_rounds=40, seed=2)
