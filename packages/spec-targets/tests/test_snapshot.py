import random

import mlx.core as mx
import pytest

from spec_core import StateError
from spec_targets.snapshot import rebuilt


def ids_of(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(61) for _ in range(n)]


def prefilled(target, ids):
    cache = target.make_cache()
    target.prefill(ids, cache)
    return cache


def next_logits(target, cache):
    output = target.verify(mx.array([5, 8, 1], mx.int32), cache)
    target.commit(cache, 0)
    return output.logits


FAMILIES_TRIED = ("llama", "gemma3_text", "phi3", "qwen3_5", "lfm2", "mamba2", "deepseek_v3")


@pytest.mark.parametrize("model_type", FAMILIES_TRIED)
def test_a_thawed_state_goes_on_like_a_fresh_one_at_every_length_in_reach(make_target, model_type):
    target = make_target(model_type)
    ids = ids_of(40, 1)
    live = prefilled(target, ids)
    frozen = target.freeze(live)
    assert frozen.offset == 40 and frozen.nbytes > 0
    reached = 0
    for n in (40, 39, 33, 20, 7, 1):
        if frozen.reach(n) != n:
            with pytest.raises(ValueError, match="within reach"):
                target.thaw(frozen, n)
            continue
        reached += 1
        cache = target.thaw(frozen, n)
        assert cache.offset == n
        want = next_logits(target, prefilled(target, ids[:n]))
        assert mx.abs(next_logits(target, cache) - want).max().item() < 1e-4
    assert reached >= (1 if model_type in ("qwen3_5", "lfm2", "mamba2") else 2)


def test_a_window_that_dropped_rows_reaches_only_where_it_is_whole(make_target):
    target = make_target("gemma3_text")
    cache = target.make_cache()
    ids = ids_of(400, 2)
    for start in range(0, 400, 50):
        target.prefill(ids[start : start + 50], cache)
    frozen = target.freeze(cache)
    assert frozen.reach(400) == 400 and frozen.reach(30) == 0
    shortest = next(n for n in range(1, 401) if frozen.reach(n) == n)
    thawed = target.thaw(frozen, shortest)
    want = next_logits(target, prefilled(target, ids[:shortest]))
    assert mx.abs(next_logits(target, thawed) - want).max().item() < 1e-4


def test_freezing_is_a_copy(make_target):
    target = make_target("llama")
    live = prefilled(target, ids_of(10, 3))
    frozen = target.freeze(live)
    before = next_logits(target, target.thaw(frozen, 10))
    target.prefill(ids_of(30, 4), live)
    first, second = target.thaw(frozen, 10), target.thaw(frozen, 10)
    target.prefill([1, 2, 3], first)
    assert mx.array_equal(next_logits(target, second), before).item()


@pytest.mark.parametrize("model_type", FAMILIES_TRIED)
def test_arrays_and_layout_rebuild_the_state(make_target, model_type):
    target = make_target(model_type)
    frozen = target.freeze(prefilled(target, ids_of(20, 5)))
    again = rebuilt(frozen.arrays(), frozen.layout(), frozen.offset)
    got, want = (next_logits(target, target.thaw(f, 20)) for f in (again, frozen))
    assert mx.array_equal(got, want).item()


def test_open_or_empty_caches_are_not_frozen(make_target):
    target = make_target("llama")
    assert target.freeze(target.make_cache()) is None
    cache = prefilled(target, [1, 2])
    target.verify(mx.array([3], mx.int32), cache)
    with pytest.raises(StateError, match="open block"):
        target.freeze(cache)


def test_packed_states_are_frozen_packed(make_target):
    target = make_target("qwen3", kv_bits=8, head_dim=32, hidden_size=128)
    ids = ids_of(30, 6)
    frozen = target.freeze(prefilled(target, ids))
    assert frozen.entries[0].kind == "packed" and frozen.reach(17) == 17
    for n in (30, 17):
        want = next_logits(target, prefilled(target, ids[:n]))
        assert mx.array_equal(next_logits(target, target.thaw(frozen, n)), want).item()
