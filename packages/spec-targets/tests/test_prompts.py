"""Prompts forwarded together against each one's own `prefill`, on tiny models."""

import random

import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, generate
from spec_core.batch import Batch
from spec_core.protocols import PromptsTogether
from spec_core.testing import ToyDrafter
from spec_targets.prompts import MOST

LENGTHS = (1, 3, 17, 60, 2)


def prompts_of(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(n)] for n in lengths]


@pytest.fixture
def padding(make_target, serve):
    """A target that pads its batches: by masks, or with kernels that read whole buffers."""

    def make(model_type, kernels=False, **fields):
        if kernels:
            return serve(model_type, **fields)
        if model_type == "llama" and "kv_bits" not in fields:
            fields["layer_types"] = ["full_attention"] * 3
        target = make_target(model_type, **fields)
        assert target.batch_refusal is None
        target._whole = Pads()
        return target

    return make


class Pads:
    """Stands in for kernels of a device that pads, and forwards nothing."""

    pads = serves = True

    def __call__(self, blocks, cache, taps):
        return None


def both(target, lengths, taps=(0, 2)):
    """Caches and outputs, forwarded together and alone."""
    prompts = prompts_of(lengths)
    caches = [target.make_cache() for _ in prompts]
    own = [target.make_cache() for _ in prompts]
    outputs = target.prefill_rows(prompts, caches, taps=taps)
    pairs = zip(prompts, own, strict=True)
    return prompts, caches, outputs, own, [target.prefill(p, c, taps=taps) for p, c in pairs]


def near(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    assert mx.abs(got - want).max().item() < 1e-5 * max(mx.abs(want).max().item(), 1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1), (MOST,) * 6, (17,), (5, MOST, 4) * 4])
def test_caches_and_outputs_are_those_of_each_prompt_alone(padding, model_type, lengths):
    target = padding(model_type)
    assert isinstance(target, PromptsTogether) and target.most_prompt_ids == MOST
    prompts, caches, outputs, own, wanted = both(target, lengths)
    for prompt, cache, got, alone, want in zip(prompts, caches, outputs, own, wanted, strict=True):
        assert got.logits.shape == (1, target.vocab_size) and len(got.taps) == 2
        near(got.logits, want.logits)
        for a, b in zip(got.taps, want.taps, strict=True):
            near(a, b)
        assert cache.offset == len(prompt) and not cache.is_open and not cache.torn
        for entry, single in zip(cache.entries, alone.entries, strict=True):
            assert entry.offset == single.offset and entry.keys.shape[0] == 1
            for a, b in zip(entry.keys_and_values(), single.keys_and_values(), strict=True):
                near(a, b)


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_go_on_as_after_their_own_prefill(padding, kernels):
    target = padding("qwen3", kernels)
    _, caches, _, own, _ = both(target, LENGTHS)
    block = mx.array([5, 9, 2], mx.int32)
    for n_keep in (2, 0, 3, 1, 3, 3):  # first writes into what the rows share, then buffers grow
        for one, other in zip(caches, own, strict=True):
            near(target.verify(block, one).logits, target.verify(block, other).logits)
            target.commit(one, n_keep)
            target.commit(other, n_keep)
    frozen = [target.freeze(cache) for cache in caches]
    near(*(target.thaw(f, 1).entries[0].keys for f in (frozen[2], target.freeze(own[2]))))
    together, others = target.join(caches), target.join(own)
    blocks = mx.broadcast_to(block, (len(LENGTHS), 3))
    for _ in range(6):
        near(*(target.verify_rows(blocks, c).logits for c in (together, others)))
        for cache in (together, others):
            target.commit_rows(cache, [0, 1, 2, 3, 2])
    single = [target.extract(cache, 3) for cache in (together, others)]
    near(*(target.verify(block, cache).logits for cache in single))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_batch_whose_prompts_went_together_equals_solo_runs(padding, model_type, kernels):
    target, joint = padding(model_type, kernels), []
    prompts = prompts_of((*LENGTHS, 40, 7, 9))
    own = target.prefill_rows

    def watched(prompts, caches, *, taps=()):
        joint.append(len(prompts))
        return own(prompts, caches, taps=taps)

    target.prefill_rows = watched
    want = []
    for prompt in prompts:
        pair = Pair(target, ToyDrafter(61, max_draft=4))
        rounds = generate(pair, prompt, max_tokens=20, cap=FixedCap(2), stop_ids=())
        want.append([t for r in rounds for t in r.tokens])
    batch, got = Batch(target), [[] for _ in prompts]
    for tag, prompt in enumerate(prompts):
        pair = Pair(target, ToyDrafter(61, max_draft=4))
        batch.add(pair, prompt, max_tokens=20, cap=FixedCap(2), stop_ids=(), tag=tag)
    while batch.rows:
        for row, outcome in batch.step():
            got[row.tag] += outcome.tokens
            if outcome.finish_reason:
                batch.remove(row)
    assert joint == [len(prompts)] and got == want


def test_a_forward_holds_few_shapes_and_no_more_ids_than_a_chunk(padding, monkeypatch):
    target, shapes = padding("llama"), []
    own = target._forward.rows

    def rows(ids, *args, **kwargs):
        shapes.append(ids.shape)
        return own(ids, *args, **kwargs)

    monkeypatch.setattr(target._forward, "rows", rows)
    for lengths in [(1, 2, 3), (40,) * 5, (MOST,) * 5, (3, MOST, 3, MOST, 70), (1,) * 40]:
        both(target, lengths)
    assert shapes == [
        *[(4, 32), (8, 64), (4, 128), (1, 128), (4, 128), (1, 32)],
        *[(16, 32), (16, 32), (8, 32)],
    ]


def test_only_the_last_row_of_each_prompt_meets_the_head(padding, monkeypatch):
    target, heads = padding("llama", tie_word_embeddings=False), []
    head = type(target.model.lm_head)
    own = head.__call__

    def call(module, x):
        if module is target.model.lm_head:
            heads.append(x.shape)
        return own(module, x)

    monkeypatch.setattr(head, "__call__", call)
    prompts = prompts_of((4, 9, 2))
    target.prefill_rows(prompts, [target.make_cache() for _ in prompts])
    assert [shape[:2] for shape in heads] == [(4, 1)]
    target.verify(mx.array([1, 2], mx.int32), target.make_cache())  # all rows again
    assert heads[-1][1] == 2


@pytest.mark.parametrize(
    "model_type, fields",
    [
        ("gemma3_text", {}),  # windows
        ("qwen3_5", {}),  # recurrent state
        ("mamba2", {}),
        ("llama", {"kv_bits": 8, "head_dim": 64}),
    ],
)
def test_other_kinds_of_caches_are_forwarded_alone(padding, model_type, fields):
    assert padding(model_type, **fields).most_prompt_ids == 0


def test_without_kernels_that_pad_prompts_are_forwarded_alone(make_target, serve):
    target = make_target("llama")
    assert target.most_prompt_ids == 0
    target = serve("llama")
    assert target.most_prompt_ids == MOST
    target.kernels.disable("tried")
    assert target.most_prompt_ids == 0
    exact = serve("llama")
    exact.kernels._switch.exact = True
    assert exact.most_prompt_ids == 0


def test_layers_that_share_keys_are_forwarded_alone(serve):
    layers = ["full_attention"] * 4
    target = serve("gemma4_text", layers, num_hidden_layers=4, num_kv_shared_layers=2)
    assert target.most_prompt_ids == 0


def test_what_cannot_be_forwarded_together_is_refused(padding):
    target = padding("llama")
    used = target.make_cache()
    target.prefill([1, 2], used)
    with pytest.raises(ValueError, match="need new caches"):
        target.prefill_rows([[1], [2]], [target.make_cache(), used])
    for prompt in ([], [1] * (MOST + 1)):
        with pytest.raises(ValueError, match=rf"must have 1..{MOST} ids, got {len(prompt)}\."):
            target.prefill_rows([[1], prompt], [target.make_cache() for _ in "ab"])


def test_a_forward_that_breaks_off_leaves_new_caches(padding, monkeypatch):
    target = padding("llama")
    caches = [target.make_cache() for _ in "ab"]
    own = mx.eval

    def evaluate(*arrays):
        raise RuntimeError("no memory")

    monkeypatch.setattr(mx, "eval", evaluate)
    with pytest.raises(RuntimeError, match="no memory"):
        target.prefill_rows([[1, 2], [3]], caches)
    monkeypatch.setattr(mx, "eval", own)
    assert all(c.offset == 0 and all(e.keys is None for e in c.entries) for c in caches)
    target.prefill_rows([[1, 2], [3]], caches)
    assert [cache.offset for cache in caches] == [2, 1]
