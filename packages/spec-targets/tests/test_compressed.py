"""DeepSeek-V4.1's compressed groups: rejected rows open the groups again that they had closed."""

import json
import random

import mlx.core as mx
import pytest
from mlx_lm.models.deepseek_v41 import _sparse_attention

from spec_core import LoadError
from spec_targets import load_target
from spec_targets.compressed import CompressedCache
from spec_targets.snapshot import rebuilt
from spec_targets.sparse import attend_in_order
from spec_targets.tiny import VOCAB, WINDOW, tiny_config, tiny_model

PROMPT = [3, 14, 15, 9, 26, 5, 35]
FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


def states(cache):
    return [{name: getattr(entry, name) for name in FIELDS} for entry in cache.entries]


def same(a, b):
    """Equal states to the bit, nothing and no rows being the same."""
    for one, other in zip(a, b, strict=True):
        for name in FIELDS:
            x, y = one[name], other[name]
            if (x is None or x.size == 0) and (y is None or y.size == 0):
                continue
            assert x.shape == y.shape, name
            assert mx.array_equal(x, y), name


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
    target, rng = make_target("deepseek_v41"), random.Random(5)
    cache, plain = target.make_cache(), target.make_cache()
    for one in (cache, plain):
        target.prefill(PROMPT, one)
    for n_round in range(n_rounds):
        block = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        n_keep = (0, 1, len(block), rng.randint(0, len(block)))[n_round % 4]
        logits = target.verify(mx.array(block), cache).logits
        target.commit(cache, n_keep)
        for row, token in zip(logits, block[:n_keep], strict=False):
            assert mx.array_equal(row, target.verify(mx.array([token]), plain).logits[0])
            target.commit(plain, 1)
        same(states(cache), states(plain))


def test_a_frozen_state_goes_on_like_the_live_one(make_target):
    target = make_target("deepseek_v41")
    cache = target.make_cache()
    target.prefill(PROMPT * 3, cache)
    frozen = target.freeze(cache)
    assert frozen is not None and frozen.reach(21) == 21 and frozen.reach(20) == 0
    arrays, layout = frozen.arrays(), json.loads(json.dumps(frozen.layout()))
    for again in (frozen, rebuilt(arrays, layout, frozen.offset)):
        thawed = target.thaw(again, 21)
        same(states(thawed), states(cache))
        block = mx.array([4, 8, 1, 2, 3])
        logits = [target.verify(block, one).logits for one in (thawed, target.thaw(again, 21))]
        assert mx.array_equal(*logits)
        target.commit(thawed, 2)
    target.verify(block, cache)
    target.commit(cache, 2)
    same(states(thawed), states(cache))
    assert target.freeze(target.make_cache()) is None


def test_no_op_makes_a_row_depend_on_its_neighbours(make_target):
    assert make_target("deepseek_v41").exact_refusal is None


def test_a_row_attends_to_the_keys_it_was_given_in_whatever_order():
    """Against the library's own function: the places change, the keys do not."""
    attention = tiny_model("deepseek_v41").model.layers[1].self_attn
    rng = mx.random.key(3)
    q = mx.random.normal((1, 3, 4, 8), key=rng)
    kvs = [mx.random.normal((1, n, 8), key=mx.random.key(n)) for n in (9, 5)]
    window = mx.array([[[0, 1, 2, -1], [1, 2, 3, -1], [2, 3, 4, 5]]])
    groups = mx.array([[[3, -1, 0], [-1, -1, 4], [2, 1, 0]]])
    settings = {"sinks": mx.zeros((4,)), "scale": 0.3}
    want = _sparse_attention(q, kvs, [window, groups], **settings)
    attend_in_order(attention, 12, 6)
    attend = type(attention).__call__.__globals__["_sparse_attention"]
    assert mx.allclose(attend(q, kvs, [window, groups], **settings), want, atol=1e-6)
    alone = _sparse_attention(q, kvs[:1], [window], **settings)
    assert mx.allclose(attend(q, kvs[:1], [window], **settings), alone, atol=1e-6)


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
        assert mx.allclose(tap, seen[layer][0].mean(axis=1), atol=1e-4)


def test_a_layer_with_engrams_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("deepseek_v41", engram_layer_ids=[1]))
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"embed.weight": mx.zeros((61, 32))})
    with pytest.raises(LoadError, match=r"Layers \[1\] use engram memory"):
        load_target(tmp_path)
