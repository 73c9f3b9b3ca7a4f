"""Short prompts that wait at the same time go through the target in one forward."""

import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, generate
from spec_core.batch import Batch
from spec_core.protocols import PromptsTogether
from spec_core.testing import ToyDrafter

from . import test_batch
from .test_batch import BrokenDrafter, ToyBatchTarget, alone, drain, run, settings


class Joint(ToyBatchTarget):
    """Notes which prompts it forwards together and which alone."""

    most_prompt_ids = 6

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails
        self.together, self.taps, self.single = [], [], []

    def prefill(self, tokens, cache, *, taps=()):
        self.single.append(list(tokens))
        return super().prefill(tokens, cache, taps=taps)

    def prefill_rows(self, prompts, caches, *, taps=()):
        self.together.append([list(prompt) for prompt in prompts])
        self.taps.append(list(taps))
        assert all(cache.offset == 0 for cache in caches)
        both = zip(prompts, caches, strict=True)
        outputs = [ToyBatchTarget.prefill(self, p, c, taps=taps) for p, c in both]
        if self.fails:
            raise RuntimeError("no memory")
        return outputs

    def forwarded(self):
        return self.together, self.single


def add(batch, target, prompt, **more):
    given = {"max_tokens": 9, "stop_ids": (), "prefill_chunk": 8, **more}
    return batch.add(Pair(target, given.pop("drafter", None)), prompt, **given)


def wanted(prompts, **more):
    rounds = [
        generate(Pair(ToyBatchTarget()), p, max_tokens=9, stop_ids=(), **more) for p in prompts
    ]
    return [[t for r in own for t in r.tokens] for own in rounds]


def test_prompts_that_wait_are_forwarded_at_once():
    target, batch, prompts = Joint(), None, [[1, 2], [3], [4, 5, 6]]
    assert isinstance(target, PromptsTogether) and not isinstance(ToyBatchTarget(), PromptsTogether)
    batch = Batch(target)
    seen = []
    for tag, prompt in enumerate(prompts):
        add(batch, target, prompt, tag=tag, on_prefill=lambda r, *n: seen.append((r.tag, *n)))
    first = batch.step()
    assert [row.tag for row, _ in first] == [0, 1, 2]
    assert all(outcome.kind == "prefill" for _, outcome in first)
    assert [outcome.offset for _, outcome in first] == [2, 1, 3]
    assert seen == [(0, 2, 2), (1, 1, 1), (2, 3, 3)]
    assert target.forwarded() == ([prompts], [])
    got = [list(outcome.tokens) for _, outcome in first]
    drain(batch, got)
    assert got == wanted(prompts)
    assert target.forwarded() == ([prompts], [])


def test_outputs_that_break_the_contract_are_not_taken():
    class Short(Joint):
        def prefill_rows(self, prompts, caches, *, taps=()):
            return super().prefill_rows(prompts, caches, taps=taps)[1:]

    class Blind(Joint):
        def prefill_rows(self, prompts, caches, *, taps=()):
            return super().prefill_rows(prompts, caches)

    prompts = [[1, 2], [3]]
    for target in (Short(), Blind()):
        batch, got = Batch(target), [[], []]
        for tag, prompt in enumerate(prompts):
            add(batch, target, prompt, tag=tag, drafter=ToyDrafter(taps=(1,)), cap=FixedCap(0))
        drain(batch, got)
        assert got == wanted(prompts) and target.forwarded() == ([prompts], prompts)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_emit_what_they_emit_alone(fails, monkeypatch):
    """Greedy and sampled, with guides, penalties, drafts and taps of their own."""
    monkeypatch.setattr(test_batch, "settings", lambda n: settings(n) | {"prefill_chunk": 16})
    target = Joint(fails)
    got, widths = run(Batch(target), target, range(9))
    assert max(widths) >= 3 and target.together and target.single
    assert got == {seed: alone(ToyBatchTarget(), seed) for seed in range(9)}


def test_a_joint_forward_that_fails_is_repeated_row_by_row():
    target, prompts = Joint(fails=True), [[1, 2], [3]]
    batch = Batch(target)
    for tag, prompt in enumerate(prompts):
        add(batch, target, prompt, tag=tag)
    got = [[], []]
    drain(batch, got)
    assert got == wanted(prompts) and target.forwarded() == ([prompts], prompts)


def test_each_drafter_is_shown_its_own_taps():
    class Watching(ToyDrafter):
        def observe(self, tokens, output):
            if not self.observed:
                want = target.embed(mx.array(tokens))
                assert len(output.taps) == len(self.taps)
                for layer, tap in zip(self.taps, output.taps, strict=True):
                    assert mx.array_equal(tap, want + layer)
            super().observe(tokens, output)

    target = Joint()
    batch = Batch(target)
    drafters = [Watching(taps=(1, 3)), Watching(taps=(2,)), Watching()]
    for tag, one in enumerate(drafters):
        one.observed = [7]  # of another text
        add(batch, target, [1 + tag, 2], drafter=one, tag=tag, cap=FixedCap(2))
    assert all(outcome.kind == "prefill" for _, outcome in batch.step())
    assert target.taps == [[1, 2, 3]] and not target.single
    assert [one.observed for one in drafters] == [[1, 2], [2, 2], [3, 2]]


def test_a_drafter_that_fails_at_its_prompt_fails_alone():
    target = Joint()
    batch = Batch(target)
    for tag in range(2):
        add(batch, target, [1 + tag, 2], tag=tag)
    bad = add(batch, target, [1, 2, 3], drafter=BrokenDrafter("prefill"))
    got, errors = [[], []], []
    drain(batch, got, errors)
    assert [row for row, _ in errors] == [bad] and got == wanted([[1, 2], [2, 2]])


def test_what_cannot_go_with_others_goes_alone():
    target = Joint()
    batch, cache = Batch(target), target.make_cache()
    target.prefill([5], cache)
    target.single.clear()
    wide = {"prefill_chunk": 64}
    add(batch, target, [1, 2], tag=0, **wide)
    add(batch, target, [1] * 7, tag=1, **wide)  # longer than the target's limit
    add(batch, target, [5, 6], tag=2, cache=cache, **wide)
    add(batch, target, [7, 8], tag=3, on_prompt_logits=lambda *_: None, **wide)
    add(batch, target, [2], tag=4, cache=target.make_cache(), **wide)
    for tag in (5, 6):
        add(batch, target, [tag], tag=tag, **wide)
    add(batch, target, [3, 4], tag=7, prefill_chunk=1)  # in two chunks, so another step
    got = [[] for _ in range(8)]
    drain(batch, got)
    assert target.forwarded() == ([[[1, 2], [5], [6]]], [[1] * 7, [6], [2], [3], [4]])
    assert got == wanted([[1, 2], [1] * 7, [5, 6], [7, 8], [2], [5], [6], [3, 4]])


@pytest.mark.parametrize("share", [True, False])
def test_one_prompt_or_rows_that_share_nothing_are_forwarded_alone(share):
    target = Joint()
    batch = Batch(target, share=share)
    for prompt in [[1, 2]] if share else [[1, 2], [3]]:
        add(batch, target, prompt)
    batch.step()
    assert target.forwarded() == ([], [[1, 2]] if share else [[1, 2], [3]])


def test_no_more_is_forwarded_at_once_than_a_chunk_may_have():
    target = Joint()
    batch = Batch(target)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8], [9], [2]]
    for tag, prompt in enumerate(prompts):
        add(batch, target, prompt, tag=tag)
    assert len(batch.step()) == 3
    assert target.together == [prompts[:3]]
    begun = [row.tag for row in batch.rows if row.run.cache.offset]
    assert sorted(begun) == [0, 1, 2]
    assert sum(outcome.kind == "prefill" for _, outcome in batch.step()) == 2
    assert target.together == [prompts[:3], prompts[3:]]
    drain(batch, [[] for _ in prompts])


def test_only_prompts_whose_turn_comes_in_this_step_are_forwarded():
    """A prompt with smaller chunks ends the step, as where every row's logits are asked for."""
    target = Joint()
    batch = Batch(target)
    prompts = [[1, 2], [3] * 9, [4, 5], [6]]
    for tag, prompt in enumerate(prompts):
        add(batch, target, prompt, tag=tag, prefill_chunk=4 if tag == 1 else 16)
    assert [row.tag for row, _ in batch.step()] == [0]
    assert target.forwarded() == ([], [[1, 2]])
    got = [[] for _ in prompts]
    drain(batch, got)
    assert target.forwarded() == ([[[4, 5], [6]]], [[1, 2], [3] * 4, [3] * 4, [3]])
    assert got[1:] == wanted(prompts)[1:]


def test_a_row_that_leaves_before_its_turn_leaves_nothing_behind():
    """A step that breaks off, here in a callback, finds the rest forwarded already."""
    target, own = Joint(), ToyDrafter()
    batch = Batch(target)

    def interrupt(*_):
        raise KeyboardInterrupt

    first = add(batch, target, [1, 2], on_prefill=interrupt)
    second = add(batch, target, [3, 4], tag=0, drafter=own, cap=FixedCap(0))
    third = add(batch, target, [5], tag=0)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    assert second.run.forwarded is not None
    batch.remove(first)
    assert batch.remove(second).offset == 0 and own.observed == []
    assert second.run.forwarded is None and batch.rows == [third]
    got = [[]]
    drain(batch, got)
    assert got == wanted([[5]]) and not target.single


def test_a_step_that_broke_off_has_not_forwarded_in_vain():
    target, prompts = Joint(), [[1, 2], [3, 4], [5], [6]]
    batch = Batch(target)

    def interrupt(*_):
        raise KeyboardInterrupt

    first = add(batch, target, prompts[0], on_prefill=interrupt)
    for tag, prompt in enumerate(prompts[1:3]):
        add(batch, target, prompt, tag=tag)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    batch.remove(first)
    add(batch, target, prompts[3], tag=2)
    got = [[], [], []]
    drain(batch, got)
    assert target.forwarded() == ([prompts[:3]], [[6]]) and got == wanted(prompts[1:])


def test_a_joint_forward_counts_as_each_rows_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(Joint):
        def prefill_rows(self, prompts, caches, *, taps=()):
            now[0] += 0.25
            return super().prefill_rows(prompts, caches, taps=taps)

    target = Slow()
    batch = Batch(target)
    for _ in range(2):
        add(batch, target, [1, 2])
    assert [outcome.elapsed_s for _, outcome in batch.step()] == [0.25, 0.25]
