"""DeepSeek-V4.1's compressed groups: rejected rows open the groups again that they had closed."""

import json
import random

import mlx.core as mx
import pytest

from spec_core import LoadError
from spec_targets import load_target
from spec_targets.compressed import CompressedCache
from spec_targets.tiny import VOCAB, WINDOW, tiny_config

PROMPT = [3, 14, 15, 9, 26, 5, 35]
FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


def states(cache):
    return [{name: getattr(entry, name) for name in FIELDS} for entry in cache.entries]


def same(a, b, atol=0.0):
    """Equal states, nothing and no rows being the same."""
    for one, other in zip(a, b, strict=True):
        for name in FIELDS:
            x, y = one[name], other[name]
            if (x is None or x.size == 0) and (y is None or y.size == 0):
                continue
            assert x.shape == y.shape, name
            assert mx.abs(x - y).max().item() <= atol, name


def test_the_groups_of_a_cache_are_those_of_its_tokens(make_target):
    target = make_target("deepseek_v41")
    cache = target.make_cache()
    assert all(type(entry) is CompressedCache for entry in cache.entries)
    target.prefill(PROMPT, cache)
    groups = [0 if e.compress_kv is None else e.compress_kv.shape[1] for e in cache.entries]
    assert groups == [0, 3, 1, 7, 0, 0]  # ratios 2, 4 and 1; the others compress nothing
    assert [e.pending_kv.shape[1] for e in cache.entries[1:3]] == [1, 3]


@pytest.mark.parametrize("n_rounds", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_rejected_rows_leave_no_trace(make_target, n_rounds):
    """Whatever the rejected rows were, the state is the same to the bit."""
    target, rng = make_target("deepseek_v41"), random.Random(4)
    caches = [target.make_cache(), target.make_cache()]
    for cache in caches:
        target.prefill(PROMPT, cache)
    for n_round in range(n_rounds):
        width = rng.randint(1, 9)
        n_keep = (0, 1, width, rng.randint(0, width))[n_round % 4]
        kept = [rng.randrange(VOCAB) for _ in range(n_keep)]
        for cache in caches:
            block = kept + [rng.randrange(VOCAB) for _ in range(width - n_keep)]
            target.verify(mx.array(block), cache)
            target.commit(cache, n_keep)
        same(*(states(cache) for cache in caches))
    assert caches[0].offset > 2 * WINDOW


@pytest.mark.parametrize("n_rounds", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_the_state_after_any_rejects_is_that_of_plain_steps(make_target, n_rounds):
    """Up to rounding: a row's sums run over as many groups as its whole block has."""
    target, rng = make_target("deepseek_v41"), random.Random(5)
    cache, plain = target.make_cache(), target.make_cache()
    for one in (cache, plain):
        target.prefill(PROMPT, one)
    for n_round in range(n_rounds):
        block = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        n_keep = (0, 1, len(block), rng.randint(0, len(block)))[n_round % 4]
        target.verify(mx.array(block), cache)
        target.commit(cache, n_keep)
        for token in block[:n_keep]:
            target.verify(mx.array([token]), plain)
            target.commit(plain, 1)
        same(states(cache), states(plain), atol=1e-4)


def test_taps_are_the_mean_over_the_copies_of_the_stream(make_target, make_model):
    target, model = make_target("deepseek_v41"), make_model("deepseek_v41")
    output = target.prefill(PROMPT, target.make_cache(), taps=(1, 4))
    seen = []
    for layer in model.layers:
        original = type(layer)

        def call(self, *args, _original=original, **kwargs):
            result = _original.__call__(self, *args, **kwargs)
            seen.append(result[0])
            return result

        layer.__class__ = type("Watched", (original,), {"__call__": call})
    model(mx.array([PROMPT]))
    for tap, layer in zip(output.taps, (1, 4), strict=True):
        assert seen[layer].shape == (1, len(PROMPT), 4, 32)
        assert mx.array_equal(tap, seen[layer][0].mean(axis=1))


def test_a_layer_with_engrams_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("deepseek_v41", engram_layer_ids=[1]))
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"embed.weight": mx.zeros((61, 32))})
    with pytest.raises(LoadError, match=r"Layers \[1\] use engram memory"):
        load_target(tmp_path)
