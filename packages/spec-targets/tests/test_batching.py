"""Batched rows against the same rows alone, on tiny models of every family."""

import random
from contextlib import contextmanager

import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, Sampling, StateError, generate
from spec_core.batch import Batch
from spec_core.testing import ToyDrafter
from spec_targets.families import FAMILIES
from spec_targets.ragged import RaggedCache


def prompt_of(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(61) for _ in range(n)]


def settings(seed: int) -> dict:
    samplings = [
        Sampling(),
        Sampling(temperature=0.9, top_k=20, seed=seed),
        Sampling(temperature=1.2, min_p=0.05, repetition_penalty=1.3, seed=seed + 1),
        Sampling(frequency_penalty=0.7),
    ]
    return {
        "prompt": prompt_of(3 + 7 * (seed % 5), seed),
        "max_tokens": 9 + 6 * (seed % 4),
        "sampling": samplings[seed % 4],
        "cap": (0, 2, 4)[seed % 3],
        "stop_ids": (seed % 61,),
    }


def alone(target, seed: int):
    given = settings(seed)
    drafter = ToyDrafter(61, max_draft=4)
    rounds = generate(
        Pair(target, drafter), given["prompt"], max_tokens=given["max_tokens"],
        sampling=given["sampling"], cap=FixedCap(given["cap"]), stop_ids=given["stop_ids"],
        with_logits=True, prefill_chunk=8,
    )  # fmt: skip
    return summary(list(rounds))


def summary(rounds):
    ids = [t for r in rounds for t in r.tokens]
    return ids, mx.concatenate([r.logits for r in rounds]), rounds[-1].finish_reason


def add(batch: Batch, target, seed: int):
    given = settings(seed)
    return batch.add(
        Pair(target, ToyDrafter(61, max_draft=4)), given["prompt"],
        max_tokens=given["max_tokens"], sampling=given["sampling"], cap=FixedCap(given["cap"]),
        stop_ids=given["stop_ids"], with_logits=True, prefill_chunk=8, tag=seed,
    )  # fmt: skip


def drain(batch: Batch, arrivals: dict[int, list[int]], target, leave=()) -> tuple[dict, set]:
    """Rows arrive at given steps; returns rounds by tag and the widths seen."""
    done: dict[int, list] = {}
    widths: set[int] = set()
    step = 0
    while batch.rows or any(at >= step for at in arrivals):
        for seed in arrivals.get(step, ()):
            add(batch, target, seed)
        for row, round_ in batch.step():
            assert not isinstance(round_, Exception), round_
            done.setdefault(row.tag, []).append(round_)
            if round_.finish_reason is not None or (row.tag, len(done[row.tag])) in leave:
                cache = batch.remove(row)
                n_forwarded = len(settings(row.tag)["prompt"]) - 1
                n_forwarded += sum(len(r.tokens) for r in done[row.tag])
                assert cache.offset == n_forwarded and not cache.is_open
        widths.add(batch.width)
        step += 1
    return done, widths


FAMILIES_TRIED = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gemma3",
    "qwen3_5", "lfm2", "nemotron_h", "mamba2", "deepseek_v3",
)  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES_TRIED)
def test_every_row_of_a_mixed_batch_equals_its_solo_run(make_target, model_type):
    target = make_target(model_type)
    assert target.batch_refusal is None
    arrivals = {0: [0, 1, 2, 3], 2: [4, 5], 9: [6, 7, 8], 14: [9], 60: [10], 75: [11]}
    done, widths = drain(Batch(target), arrivals, target)
    assert {1, 2}.issubset(widths) and max(widths) >= 4
    for seed in range(12):
        ids, logits, reason = summary(done[seed])
        want_ids, want_logits, want_reason = alone(target, seed)
        assert (ids, reason) == (want_ids, want_reason), seed
        assert mx.abs(logits - want_logits).max().item() < 1e-4, seed


def test_rows_that_leave_early_change_nothing_for_the_others(make_target):
    target = make_target("qwen3")
    done, _ = drain(Batch(target), {0: [3, 4, 6, 7]}, target, leave={(4, 3), (7, 2)})
    for seed in (3, 6):
        assert summary(done[seed])[0] == alone(target, seed)[0]


def test_without_sharing_rows_take_turns(make_target):
    target = make_target("llama")
    batch = Batch(target, share=False)
    done, widths = drain(batch, {0: [0, 1, 2]}, target)
    assert max(widths) == 1 and batch.refusal == "batching is switched off"
    for seed in range(3):
        assert summary(done[seed])[0] == alone(target, seed)[0]


@pytest.mark.parametrize("model_type", FAMILIES_TRIED)
def test_a_row_that_left_goes_on_by_itself(make_target, model_type):
    """What `extract` gives answers like the sequence that was never batched."""
    target = make_target(model_type)
    prompts = [prompt_of(n, n) for n in (5, 31, 18)]
    singles = []
    for prompt in prompts:
        cache = target.make_cache()
        target.prefill(prompt, cache)
        singles.append(cache)
    batch = target.join(singles)
    committed = [list(p) for p in prompts]
    rng = random.Random(5)
    for _ in range(12):
        width = rng.randint(1, 6)
        blocks = [[rng.randrange(61) for _ in range(width)] for _ in prompts]
        target.verify_rows(mx.array(blocks, mx.int32), batch)
        keep = [rng.randint(0, width) for _ in prompts]
        target.commit_rows(batch, keep)
        for ids, block, n in zip(committed, blocks, keep, strict=True):
            ids += block[:n]
    batch = target.select(batch, [2, 0])
    for row, ids in enumerate([committed[2], committed[0]]):
        single = target.extract(batch, row)
        assert single.offset == len(ids)
        fresh = target.make_cache()
        target.prefill(ids, fresh)
        block = mx.array([4, 9, 2], mx.int32)
        got = target.verify(block, single).logits
        want = target.verify(block, fresh).logits
        assert mx.abs(got - want).max().item() < 1e-4


def test_open_and_closed_are_kept_apart(make_target):
    target = make_target("llama")
    caches = [target.make_cache() for _ in range(2)]
    for cache in caches:
        target.prefill([1, 2, 3], cache)
    batch = target.join(caches)
    with pytest.raises(StateError, match="No block is open"):
        target.commit_rows(batch, [1, 1])
    target.verify_rows(mx.array([[1, 2], [3, 4]], mx.int32), batch)
    with pytest.raises(StateError, match="Blocks of 2 rows are open"):
        target.verify_rows(mx.array([[1], [3]], mx.int32), batch)
    with pytest.raises(StateError, match="open block"):
        target.join([batch, target.make_cache()])
    for wrong in ([1], [1, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"2 numbers in 0\.\.2"):
            target.commit_rows(batch, wrong)
    target.commit_rows(batch, [2, 0])
    assert batch.offsets == [5, 3]


def test_a_row_that_fails_fails_alone(make_target):
    target = make_target("llama")

    class Broken(ToyDrafter):
        def draft(self, anchor, cap, *, sampling, key):
            if len(self.observed) > 8:
                raise RuntimeError("boom")
            return super().draft(anchor, cap, sampling=sampling, key=key)

    batch = Batch(target)
    add(batch, target, 4)
    add(batch, target, 7)
    bad = batch.add(Pair(target, Broken(61)), [1, 2, 3, 4], max_tokens=30, tag="bad")
    rounds: dict = {}
    errors = []
    while batch.rows:
        for row, outcome in batch.step():
            if isinstance(outcome, Exception):
                errors.append((row, str(outcome)))
                batch.remove(row)
                continue
            rounds.setdefault(row.tag, []).append(outcome)
            if outcome.finish_reason is not None:
                batch.remove(row)
    assert errors == [(bad, "boom")]
    for seed in (4, 7):
        assert summary(rounds[seed])[0] == alone(target, seed)[0]


def test_a_forward_that_fails_is_repeated_row_by_row(make_target, monkeypatch):
    """Nobody knows whose fault a batched forward is; alone, each row shows it or goes on."""
    target = make_target("qwen3")
    calls = {"n": 0}
    original = RaggedCache.update_and_fetch

    def fragile(self, keys, values):
        calls["n"] += 1
        if calls["n"] == 8:
            raise RuntimeError("out of memory")
        return original(self, keys, values)

    monkeypatch.setattr(RaggedCache, "update_and_fetch", fragile)
    done, _ = drain(Batch(target), {0: [1, 2, 3]}, target)
    assert calls["n"] > 8
    for seed in (1, 2, 3):
        ids, _, reason = summary(done[seed])
        want_ids, _, want_reason = alone(target, seed)
        assert (ids, reason) == (want_ids, want_reason)


@pytest.mark.parametrize(("dtype", "refused"), [(mx.float32, True), (mx.bfloat16, False)])
def test_the_rounding_of_16_bits_is_no_mixing_of_rows(make_target, monkeypatch, dtype, refused):
    """On a GPU a forward of another shape runs other kernels."""
    target = make_target("llama", dtype=dtype)
    own = target._forward.rows

    def rounded(blocks, entries, taps):
        logits, tapped = own(blocks, entries, taps)
        noise = mx.random.normal(logits.shape, key=mx.random.key(0)) * mx.std(logits)
        return (logits + 0.06 * noise).astype(dtype), tapped

    monkeypatch.setattr(target._forward, "rows", rounded)
    assert (target.batch_refusal is not None) == refused


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_model_that_mixes_rows_is_refused(make_target, monkeypatch, dtype):
    target = make_target("llama", dtype=dtype)
    own = target._forward.rows

    def mixing(blocks, entries, taps):
        logits, tapped = own(blocks, entries, taps)
        return logits + logits.mean(axis=0, keepdims=True), tapped

    monkeypatch.setattr(target._forward, "rows", mixing)
    assert "depends on the sequences beside it" in target.batch_refusal
    assert Batch(target).refusal == target.batch_refusal


def test_packed_rows_share_a_forward_too(make_target):
    target = make_target("qwen3", kv_bits=8, head_dim=32, hidden_size=128)
    assert target.batch_refusal is None
    done, widths = drain(Batch(target), {0: [0, 1, 2, 3]}, target)
    assert max(widths) >= 2
    for seed in range(4):
        ids, _, reason = summary(done[seed])
        want_ids, _, want_reason = alone(target, seed)
        assert (ids, reason) == (want_ids, want_reason), seed


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "lfm2", "nemotron_h", "gemma3_text"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_forward_that_breaks_off_leaves_every_row_as_it_was(make_target, model_type, at):
    target = make_target(model_type)

    def joined_rows():
        singles = []
        for prompt in (prompt_of(9, 1), prompt_of(17, 2)):
            cache = target.make_cache()
            target.prefill(prompt, cache)
            singles.append(cache)
        return target.join(singles)

    blocks = mx.array([prompt_of(4, 3), prompt_of(4, 4)], mx.int32)
    batch, fresh = joined_rows(), joined_rows()
    layer = FAMILIES[model_type].layers(target.model)[at]
    kind = type(layer)

    class Breaking(kind):
        def __call__(self, *args, **kwargs):
            super().__call__(*args, **kwargs)
            raise RuntimeError("the layer broke")

    for _ in range(3):
        layer.__class__ = Breaking
        with pytest.raises(RuntimeError, match="the layer broke"):
            target.verify_rows(blocks, batch)
        layer.__class__ = kind
        assert not batch.is_open
    for keep in ([2, 4], [4, 1]):
        got = target.verify_rows(blocks, batch).logits
        want = target.verify_rows(blocks, fresh).logits
        assert mx.array_equal(got, want).item()
        target.commit_rows(batch, keep)
        target.commit_rows(fresh, keep)


# -- attention kernels that read whole buffers ---------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_kernels_that_read_whole_buffers_give_the_rows_of_the_model_alone(
    serve, model_type, graphs
):
    target = serve(model_type, graphs=graphs)
    assert target.batch_refusal is None
    target.kernels._switch.calls.clear()
    done, widths = drain(Batch(target), {0: [0, 1, 2], 3: [3, 4]}, target, leave={(1, 2)})
    assert max(widths) > 1 and target._whole.serves
    assert target.kernels.report().calls["attention cuda"]
    if graphs:
        kinds = target._compiled._kinds
        assert any(kind.graph for key, kind in kinds.items() if key[-1])
        assert not any(kind.refused for kind in kinds.values()) and not target._compiled._never
    for seed, rounds in done.items():
        ids, logits, reason = alone(target, seed)
        got_ids, got_logits, got_reason = summary(rounds)
        n = len(got_ids)
        assert got_ids == ids[:n] and mx.allclose(got_logits, logits[:n], rtol=1e-4, atol=1e-4)
        assert seed == 1 or got_reason == reason


def test_rows_see_no_mask_and_no_key_of_another(serve, monkeypatch):
    """Whole buffers, with something loud behind each row's end."""
    target = serve("llama", graphs=False)
    prompts = [[5, 3, 8, 1, 9], [2, 7], [4] * 9]
    block = mx.array([[1, 2, 3]] * 3, mx.int32)
    want, parts = [], []
    for prompt in prompts:
        for caches in (parts, want):
            cache = target.make_cache()
            target.prefill(prompt, cache)
            caches.append(cache if caches is parts else target.verify(block[0], cache).logits)
    batch = target.join(parts)
    for entry in batch.entries:
        far = mx.arange(entry.capacity)[:, None] >= mx.array(entry.used).reshape(-1, 1, 1, 1)
        entry.buffers = [mx.where(far, 1e3, a) for a in entry.buffers]
    masks = []
    make_mask = RaggedCache.make_mask
    monkeypatch.setattr(
        RaggedCache, "make_mask", lambda *a, **k: masks.append(make_mask(*a, **k)) or masks[-1]
    )
    got = target.verify_rows(block, batch).logits
    assert mx.allclose(got, mx.stack(want), rtol=1e-4, atol=1e-4)
    assert set(masks) == {"causal"}


def test_a_layer_that_reads_keys_by_itself_gets_them_cut(serve, monkeypatch):
    target = serve("llama", graphs=False)
    want = two_rows(target)
    plain = serve("llama", graphs=False)
    module = type(plain.model.layers[1].self_attn)
    own = plain.model.layers[1].self_attn.__class__.__mro__[1]
    assert module is not own
    plain.model.layers[1].self_attn.__class__ = own  # its attention is the model's again
    assert mx.allclose(two_rows(plain), want, rtol=1e-4, atol=1e-4)
    assert not plain._whole.serves


@pytest.mark.parametrize("state", ["off", "exact", "lost heads", "long"])
def test_whole_buffers_are_for_kernels_that_serve(serve, state):
    target = serve("llama", graphs=False)
    kernels = target.kernels
    if state == "off":
        kernels.disable("tried")
    elif state == "exact":
        kernels._switch.exact = True
    elif state == "lost heads":
        kernels._attentions[0]._raced = False
    assert not kernels.reads_ragged(17 if state == "long" else 3)
    assert kernels.reads_ragged(16) == (state == "long")


def two_rows(target):
    """Logits of a block of two after prompts of two lengths."""
    caches = [target.make_cache(), target.make_cache()]
    for cache, prompt in zip(caches, ([5, 3, 8, 1], [2, 7]), strict=True):
        target.prefill(prompt, cache)
    return target.verify_rows(mx.array([[1, 2], [3, 4]], mx.int32), target.join(caches)).logits


def ragged_rounds(target, n, change=None):
    """Logits and taps of `n` blocks of several rows, of which each keeps another number."""
    caches, found = [], []
    for seed in range(3):
        cache = target.make_cache()
        target.prefill(prompt_of(3 + 4 * seed, seed), cache)
        caches.append(cache)
    batch = target.join(caches)
    for i in range(n):
        if change is not None:
            batch = change(i, batch)
        n_rows = len(batch.offsets)
        block = (mx.arange(3 * n_rows).reshape(n_rows, 3) * 7 + i) % 61
        output = target.verify_rows(block, batch, taps=(0, 2))
        found += [output.logits, *output.taps]
        mx.eval(found)
        target.commit_rows(batch, [(i + row) % 4 for row in range(n_rows)])
    return found, batch


def test_replays_of_a_batch_have_the_bits_of_its_own_forward(serve):
    def change(i, batch):
        if i == 9:
            return target.select(batch, [2, 0])
        if i == 18:
            cache = target.make_cache()
            target.prefill(prompt_of(5, 9), cache)
            return target.join([batch, cache])
        return batch

    target = serve("llama", graphs=False)
    want, of_own = ragged_rounds(target, 26, change)
    target = serve("llama")
    got, of_graphs = ragged_rounds(target, 26, change)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert {key[-1] for key, kind in target._compiled._kinds.items() if kind.graph} == {(2,), (4,)}
    assert of_graphs.offsets == of_own.offsets and not of_graphs.is_open
    for row in range(3):
        singles = [t.extract(b, row) for t, b in ((target, of_graphs), (target, of_own))]
        for a, b in zip(*(single.entries for single in singles), strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(a.state, b.state, strict=True))


def test_a_batch_that_cannot_be_traced_leaves_lone_rows_their_graphs(serve, monkeypatch):
    target = serve("llama")
    rope = type(target.model.layers[0].self_attn.rope)
    own, tracing = rope.__call__, target.kernels.tracing

    def call(self, x, offset=0):
        if x.shape[0] > 1 and target.kernels._busy:
            raise TypeError("one sequence at a time")
        return own(self, x, offset)

    @contextmanager
    def watched():
        target.kernels._busy = True
        try:
            with tracing() as calls:
                yield calls
        finally:
            target.kernels._busy = False

    target.kernels._busy = False
    monkeypatch.setattr(rope, "__call__", call)
    monkeypatch.setattr(target.kernels, "tracing", watched)
    found, _ = ragged_rounds(target, 6)
    assert len(found) == 18 and target._compiled._never == {True} and target._whole.serves


def test_an_open_batch_is_refused_with_graphs_too(serve):
    target = serve("llama")
    caches = [target.make_cache(), target.make_cache()]
    for cache in caches:
        target.prefill([5, 3, 8], cache)
    batch = target.join(caches)
    block = mx.array([[1], [2]], mx.int32)
    target.verify_rows(block, batch)
    with pytest.raises(StateError, match="are open"):
        target.verify_rows(block, batch)


def test_a_batch_meets_few_widths_and_what_pads_a_block_is_never_kept(serve):
    """Blocks of three to eight positions; against caches of their own, where nothing is padded."""
    padded, plain = serve("llama", graphs=False), serve("llama", graphs=False)
    widths: list[int] = []
    forward = padded._forward.rows

    def noted(blocks, entries, taps):
        widths.append(blocks.shape[1])
        return forward(blocks, entries, taps)

    padded._forward.rows = noted
    batch, alone = [], []
    for seed in range(2):
        for target, caches in ((padded, batch), (plain, alone)):
            caches.append(target.make_cache())
            target.prefill(prompt_of(3 + 4 * seed, seed), caches[-1])
    batch = padded.join(batch)
    for n in (3, 5, 6, 7, 8, 1, 2):
        block = (mx.arange(2 * n).reshape(2, n) * 5 + n) % 61
        output = padded.verify_rows(block, batch, taps=(0, 2))
        assert output.logits.shape[:2] == (2, n) and output.taps[1].shape[:2] == (2, n)
        for row, keep in enumerate((n, n - 1)):
            own = plain.verify(block[row], alone[row], taps=(0, 2))
            assert mx.allclose(output.logits[row], own.logits, rtol=1e-4, atol=1e-4)
            assert mx.allclose(output.taps[0][row], own.taps[0], rtol=1e-4, atol=1e-4)
            plain.commit(alone[row], keep)
        padded.commit_rows(batch, [n, n - 1])
        assert batch.offsets == [cache.offset for cache in alone]
    assert widths == [4, 8, 8, 8, 8, 1, 2]


def test_a_row_that_is_selected_twice_goes_on_as_two(serve):
    target = serve("llama", graphs=False)
    caches = [target.make_cache() for _ in range(2)]
    for cache in caches:
        target.prefill([1, 2, 3], cache)
    batch = target.select(target.join(caches), [0, 0])
    blocks = mx.array([[4, 5], [6, 7]], mx.int32)
    logits = target.verify_rows(blocks, batch).logits
    target.commit_rows(batch, [2, 1])
    assert batch.offsets == [5, 4]
    for block, got in zip(blocks, logits, strict=True):
        alone = target.make_cache()
        target.prefill([1, 2, 3], alone)
        assert mx.allclose(got, target.verify(block, alone).logits, rtol=1e-4, atol=1e-4)
