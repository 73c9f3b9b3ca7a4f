"""What may happen to caches and targets whose blocks are compiled graphs: no bit changes."""

import random
from itertools import zip_longest

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache

from spec_core import Pair, Sampling, generate
from spec_core.testing import ToyDrafter
from spec_targets.replayed import HeldAlone

PROMPT = [5, 3, 8, 1, 9, 2, 7, 4]
MOST = 96  # positions, so that a conversation ends before the stand-in's room does


def rounds(target, n):
    """Logits of blocks of which two rows are kept."""
    cache, found = target.make_cache(), []
    target.prefill(PROMPT, cache)
    for i in range(n):
        block = (mx.arange(4, dtype=mx.int32) * 7 + i) % target.vocab_size
        found.append(target.verify(block, cache).logits)
        target.commit(cache, 2)
    return found


def test_few_capacities_whatever_caches_come_from(serve):
    """A capacity is a graph: caches that were thawed or left a batch share those of others."""
    target = serve("llama")
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    frozen = target.freeze(cache)
    batch = target.join([cache, target.thaw(frozen, 5)])
    for one in (target.thaw(frozen, 3), target.thaw(frozen, 7), target.extract(batch, 1)):
        for _ in range(8):
            target.verify(mx.arange(4, dtype=mx.int32), one)
            target.commit(one, 2)
    assert {key[1] for key in target._compiled._kinds} == {32}


def test_a_prompt_takes_no_more_room_than_without_graphs(serve):
    """The server takes the price of a token from what a short prompt takes."""
    taken = []
    for target in (serve("llama"), serve("llama", graphs=False)):
        cache = target.make_cache()
        target.prefill(PROMPT, cache)
        taken.append(cache.nbytes)
    assert taken[0] == taken[1]


def test_a_layer_without_rows_is_left_alone(serve):
    target = serve("llama")
    cache = target.make_cache()
    target.verify(mx.arange(4, dtype=mx.int32), cache)
    target.commit(cache, 0)
    held = HeldAlone(target._forward, [*cache.entries, KVCache()])
    assert target._compiled(mx.arange(4, dtype=mx.int32), held, ()) is None


def test_changed_weights_need_the_kernels_anew(serve):
    target = serve("llama")
    rounds(target, 8)
    target.model.update(tree_map(lambda a: 1.1 * a, target.model.parameters()))
    target.use_kernels(target.kernels)
    got = rounds(target, 8)
    target.use_kernels(target.kernels, replay=False)
    want = rounds(target, 8)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def any_rounds(target, seed):
    """Conversations in turn, with all that can happen to a cache: every logit and tap."""
    rng, found, kept = random.Random(seed), [], []

    def ids(n):
        return [rng.randrange(target.vocab_size) for _ in range(n)]

    def new():
        cache = target.make_cache()
        target.prefill(ids(rng.randint(4, 20)), cache)
        return cache

    caches = [new(), new()]
    for _ in range(120):
        i, rows = rng.randrange(2), rng.choice([1, 3, 4, 4])
        if caches[i].offset > MOST:
            caches[i] = new()
        match rng.choice(["verify"] * 9 + ["prompt", "freeze", "thaw", "batch"]):
            case "verify":
                taps = rng.choice([(), (0, 2)])
                output = target.verify(mx.array(ids(rows), mx.int32), caches[i], taps=taps)
                n_keep = rng.choice([0, 1, rows])
                if rng.random() < 0.9:  # else abandoned before anything was computed
                    found += [output.logits, *output.taps]
                    mx.eval(found)
                target.commit(caches[i], n_keep)
            case "prompt":
                target.prefill(ids(5), caches[i])
            case "freeze":
                kept.append(target.freeze(caches[i]))
            case "thaw" if kept:
                frozen = rng.choice(kept)
                caches[i] = target.thaw(frozen, rng.randint(1, frozen.offset))
            case "batch":
                batch = target.join(caches)
                output = target.verify_rows(mx.array([ids(3), ids(3)], mx.int32), batch)
                found.append(output.logits)
                target.commit_rows(batch, [rng.randint(0, 3), 2])
                caches = [target.extract(batch, row) for row in (0, 1)]
    return found


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "hunyuan", "gemma4_text", "minimax", "nanbeige", "llama4_text"]
)
def test_nothing_that_happens_to_a_cache_changes_a_bit(serve, model_type):
    target = serve(model_type)
    got = any_rounds(target, 5)
    assert sum(kind.graph is not None for kind in target._compiled._kinds.values()) > 1
    want = any_rounds(serve(model_type, graphs=False), 5)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_targets_of_one_class_generate_as_without_graphs(serve, temperature):
    """With graphs in turn, so that one could serve the other."""

    def texts(targets):
        drafters = [ToyDrafter(t.vocab_size, taps=(0, 2)) for t in targets]
        pairs = [Pair(t, d) for t, d in zip(targets, drafters, strict=True)]
        sampling = Sampling(temperature=temperature, seed=2)
        runs = [generate(pair, PROMPT, max_tokens=60, sampling=sampling) for pair in pairs]
        return [[r and r.tokens for r in both] for both in zip_longest(*runs)]

    def targets(graphs):
        pair = [serve("llama", graphs=graphs) for _ in range(2)]
        pair[1].model.update(tree_map(lambda a: 1.3 * a, pair[1].model.parameters()))
        return pair

    assert texts(targets(graphs=True)) == texts(targets(graphs=False))
