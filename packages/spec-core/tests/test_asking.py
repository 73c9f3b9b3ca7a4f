"""Drafters that are kin draft together; what one of them breaks, the others do not feel."""

from dataclasses import replace

import mlx.core as mx
import pytest

from spec_core import Draft, FixedCap, Pair, Sampling, generate
from spec_core.batch import Batch
from spec_core.lending import Lender
from spec_core.loop import Run
from spec_core.testing import ToyDrafter, check_drafter

from .test_batch import ToyBatchTarget, alone, drain, run, settings


class Joint(ToyDrafter):
    """Notes what it is asked; the notes are its forks' too."""

    def __init__(self, taps=(2,), log=None, spoil=None):
        super().__init__(taps=taps)
        self.log = {"together": [], "alone": []} if log is None else log
        self.spoil = spoil  # what becomes of the joint drafts

    def fork(self):
        return type(self)(self.taps, self.log, self.spoil)

    @property
    def kin(self):
        return self.log

    def draft(self, anchor, cap, *, sampling, key):
        self.log["alone"].append(key.tolist())
        return super().draft(anchor, cap, sampling=sampling, key=key)

    def draft_together(self, asks):
        assert asks[0].drafter is self and len({id(ask.drafter) for ask in asks}) == len(asks)
        assert all(ask.drafter.kin is self.kin for ask in asks)
        self.log["together"].append(asks)
        drafts = [
            ToyDrafter.draft(a.drafter, a.anchor, a.cap, sampling=a.sampling, key=a.key)
            for a in asks
        ]
        return drafts if self.spoil is None else self.spoil(drafts)


class Seeing(Joint):
    """Takes its rows in together too; the fault it may have is raised before that."""

    fault = False  # of this one alone

    def observe(self, tokens, output):
        if self.fault:
            raise RuntimeError("boom")
        self.log.setdefault("shown", []).append(self)
        super().observe(tokens, output)

    def observe_together(self, observations):
        assert observations[0].drafter is self
        if self.spoil is not None or any(one.drafter.fault for one in observations):
            raise RuntimeError("boom")
        self.log.setdefault("observed", []).append(len(observations))
        for one in observations:
            assert all(tap.shape[0] == len(one.tokens) for tap in one.output.taps)
            ToyDrafter.observe(one.drafter, one.tokens, one.output)


def boom(drafts):
    raise RuntimeError("boom")


def first(change):
    """Spoils the first draft of each call."""
    return lambda drafts: [change(drafts[0]), *drafts[1:]]


def test_greedy_rows_draft_together_and_every_row_equals_its_solo_run():
    target, lender = ToyBatchTarget(), Lender(Joint())
    got, _ = run(Batch(target), target, range(12), lambda seed: lender.lend())
    want = {seed: alone(target, seed) for seed in range(12)}
    assert got == want
    calls = lender.drafter.log["together"]
    assert len(calls) > 5 and max(len(asks) for asks in calls) >= 4
    assert all(len(asks) > 1 and all(a.sampling.greedy for a in asks) for asks in calls)
    assert len({ask.cap for asks in calls for ask in asks}) > 1


SPOILT = {
    "raises": boom,
    "one too few": lambda drafts: drafts[1:],
    "one too many": lambda drafts: [*drafts, drafts[0]],
    "no list": lambda drafts: None,
    "none for a row": first(lambda draft: None),
    "no draft": first(lambda draft: 7),
    "longer than the cap": first(lambda d: replace(d, tokens=mx.zeros((9,), mx.int32))),
    "fractions": first(lambda d: replace(d, tokens=d.tokens.astype(mx.float32))),
    "confidence of another length": first(lambda d: replace(d, confidence=mx.zeros((7,)))),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_a_joint_draft_does_not_give_is_asked_for_alone(how):
    target, lender = ToyBatchTarget(), Lender(Joint(spoil=SPOILT[how]))
    got, _ = run(Batch(target), target, range(0, 12, 3), lambda seed: lender.lend())  # greedy
    assert got == {seed: alone(target, seed) for seed in range(0, 12, 3)}
    log = lender.drafter.log
    n_first = sum(len(asks) if SPOILT[how] is boom else 1 for asks in log["together"])
    assert log["together"] and len(log["alone"]) >= n_first
    asked = {tuple(ask.key.tolist()) for asks in log["together"] for ask in asks[:1]}
    assert asked <= {tuple(key) for key in log["alone"]}  # with the key it had


def test_a_row_takes_one_key_a_round_however_it_is_asked():
    def keys_of(spoil):
        lender, target = Lender(Joint(spoil=spoil)), ToyBatchTarget()
        batch = Batch(target)
        for i in range(2):
            sampling = Sampling(seed=40 + i)
            batch.add(
                Pair(target, lender.lend()), [1 + i, 2, 3], max_tokens=30, sampling=sampling,
                stop_ids=(), tag=i,
            )  # fmt: skip
        drain(batch, [[], []])
        log = lender.drafter.log
        asked = {tuple(ask.key.tolist()) for asks in log["together"] for ask in asks}
        return asked | {tuple(key) for key in log["alone"]}

    solo = set()
    for i in range(2):
        drafter = Joint()
        pair = Pair(ToyBatchTarget(), drafter)
        list(
            generate(pair, [1 + i, 2, 3], max_tokens=30, sampling=Sampling(seed=40 + i),
                     stop_ids=())
        )  # fmt: skip
        solo |= {tuple(key) for key in drafter.log["alone"]}
    assert keys_of(None) == keys_of(boom) == solo


@pytest.mark.parametrize("token", [99, 2**30, -1])
def test_ids_outside_the_vocabulary_cost_their_own_row_alone(token):
    def wrong(drafts):
        return [replace(drafts[0], tokens=mx.full(drafts[0].tokens.shape, token)), *drafts[1:]]

    target, lender = ToyBatchTarget(), Lender(Joint(spoil=wrong))
    batch, got, wanted = Batch(target), [[], []], []
    for i in range(2):
        batch.add(Pair(target, lender.lend()), [1 + i, 2], max_tokens=40, stop_ids=(), tag=i)
        rounds = generate(Pair(target), [1 + i, 2], max_tokens=40, stop_ids=())
        wanted.append([t for r in rounds for t in r.tokens])
    if token < 0:
        with pytest.warns(RuntimeWarning, match="must compute numbers"):
            drain(batch, got)
        assert len(lender.drafter.log["together"]) == 1  # then the row is parked
    else:
        drain(batch, got)
    assert got == wanted


def test_only_the_row_whose_own_drafter_fails_fails():
    class Fragile(Joint):
        broken = False

        def draft(self, anchor, cap, *, sampling, key):
            if self.broken:
                raise RuntimeError("boom")
            return super().draft(anchor, cap, sampling=sampling, key=key)

        def draft_together(self, asks):
            return [ask.alone() for ask in asks]

    target, lender = ToyBatchTarget(), Lender(Fragile())
    batch, got, errors = Batch(target), {0: [], 3: [], 6: []}, []
    for seed in got:
        given = {"max_tokens": 25, "stop_ids": (), "cap": FixedCap(3)}
        drafter = lender.lend()
        drafter.broken = seed == 3
        batch.add(Pair(target, drafter), [1 + seed, 2, 3], **given, tag=seed)
    drain(batch, got, errors)
    assert [row.tag for row, _ in errors] == [3] and "boom" in str(errors[0][1])
    for seed in (0, 6):
        rounds = generate(Pair(target), [1 + seed, 2, 3], max_tokens=25, stop_ids=())
        assert got[seed] == [t for r in rounds for t in r.tokens]


@pytest.mark.parametrize("spoil", [None, boom])
def test_drafters_observe_together_what_they_observe_alone(spoil):
    target, lender, lent = ToyBatchTarget(), Lender(Seeing(spoil=spoil)), {}

    def drafter_of(seed):
        return lent.setdefault(seed, lender.lend())

    got, _ = run(Batch(target), target, range(12), drafter_of)
    log = lender.drafter.log
    assert got == {seed: alone(target, seed) for seed in range(12)}
    for seed, drafter in lent.items():
        given = settings(seed)
        assert drafter.observed == [*given["prompt"], *got[seed][0][:-1]]
    if spoil is None:
        assert len(log["observed"]) > 5 and max(log["observed"]) >= 4
    else:
        assert "observed" not in log
    sampled = {id(lent[seed]) for seed in range(1, 12, 3)}
    n_sampled = sum(len(got[seed][0]) - 1 for seed in range(1, 12, 3))  # these step plainly
    assert sum(id(one) in sampled for one in log["shown"]) > n_sampled


@pytest.mark.parametrize("make", [Joint, Seeing])
def test_what_a_drafter_is_shown_is_made_once_a_round(make, monkeypatch):
    made, kept = [], Run.kept
    monkeypatch.setattr(Run, "kept", lambda run, *given: made.append(run) or kept(run, *given))
    target, lender, n_rounds = ToyBatchTarget(), Lender(make()), 0
    batch = Batch(target)
    for i in range(3):
        batch.add(Pair(target, lender.lend()), [1 + i, 2], max_tokens=20, stop_ids=(), tag=i)
    while batch.rows:
        for row, round_ in batch.step():
            n_rounds += round_.kind != "prefill"
            if round_.finish_reason:
                batch.remove(row)
    assert len(made) == n_rounds > 9


def test_only_the_row_whose_drafter_cannot_observe_fails():
    target, lender, wanted = ToyBatchTarget(), Lender(Seeing()), []
    batch, got, errors = Batch(target), [[], [], []], []
    for i in range(3):
        drafter = lender.lend()
        batch.add(Pair(target, drafter), [1 + i, 2], max_tokens=25, stop_ids=(), tag=i)
        rounds = generate(Pair(target), [1 + i, 2], max_tokens=25, stop_ids=())
        wanted.append([t for r in rounds for t in r.tokens])
    for _ in range(4):  # the prompts, and the first rounds
        for row, round_ in batch.step():
            got[row.tag] += round_.tokens
    batch.rows[1].run.drafter.fault = True
    bad = batch.rows[1].tag
    drain(batch, got, errors)
    assert [row.tag for row, _ in errors] == [bad] and "boom" in str(errors[0][1])
    assert all(got[i] == wanted[i] for i in range(3) if i != bad)
    assert lender.drafter.log["observed"]


def test_a_drafter_may_observe_together_and_draft_alone():
    class Watcher(Seeing):
        draft_together = None  # as if it had no such member

    target, lender = ToyBatchTarget(), Lender(Watcher())
    got, _ = run(Batch(target), target, range(0, 9, 3), lambda seed: lender.lend())
    assert got == {seed: alone(target, seed) for seed in range(0, 9, 3)}
    log = lender.drafter.log
    assert log["observed"] and log["alone"] and not log["together"]


def test_a_drafter_that_cannot_say_its_kin_goes_alone():
    class Mute(Joint):
        @property
        def kin(self):
            raise RuntimeError("boom")

    target, lender = ToyBatchTarget(), Lender(Mute())
    got, _ = run(Batch(target), target, range(0, 9, 3), lambda seed: lender.lend())
    assert got == {seed: alone(target, seed) for seed in range(0, 9, 3)}
    assert not lender.drafter.log["together"]


def test_drafters_that_are_no_kin_are_kept_apart_and_a_lone_one_is_asked_alone():
    class Loner(Joint):
        kin = None

    target, ones, others = ToyBatchTarget(), Lender(Joint()), Lender(Joint())
    loners = Lender(Loner())
    lenders = [ones, ones, others, loners, loners]
    got, _ = run(Batch(target), target, range(0, 15, 3), lambda seed: lenders[seed // 3].lend())
    assert got == {seed: alone(target, seed) for seed in range(0, 15, 3)}
    assert ones.drafter.log["together"]
    assert not others.drafter.log["together"] and others.drafter.log["alone"]
    assert not loners.drafter.log["together"] and loners.drafter.log["alone"]


def test_a_draft_without_a_source_is_named_after_its_row():
    def nameless(drafts):
        return [Draft(draft.tokens) for draft in drafts]

    target, lender, sources = ToyBatchTarget(), Lender(Joint(spoil=nameless)), set()
    batch = Batch(target)
    for i in range(2):
        batch.add(Pair(target, lender.lend()), [1 + i, 2], max_tokens=20, stop_ids=(), tag=i)
    while batch.rows:
        for row, round_ in batch.step():
            sources.add(round_.source)
            if round_.finish_reason:
                batch.remove(row)
    assert sources == {"toy", "target"} and lender.drafter.log["together"]


def test_the_conformance_kit_tests_joint_drafts():
    check_drafter(Joint(taps=()), vocab_size=12)
    check_drafter(Seeing(taps=()), vocab_size=12)

    def longer(drafts):
        return [replace(d, tokens=mx.concatenate([d.tokens, d.tokens])) for d in drafts]

    def other(drafts):
        return [replace(d, tokens=(d.tokens + 1) % 12) for d in drafts]

    class Moving(Joint):
        def draft_together(self, asks):
            self.table = self.table[::-1]
            return [None] * len(asks)

    class Unrelated(Joint):
        @property
        def kin(self):
            return self

    class Blind(Seeing):
        """Drafts by how much it has seen, and sees nothing of a joint call."""

        def draft(self, anchor, cap, *, sampling, key):
            draft = super().draft(anchor, cap, sampling=sampling, key=key)
            shift = len(self.observed) if sampling.greedy else 0
            return replace(draft, tokens=(draft.tokens + shift) % 12)

        def draft_together(self, asks):
            return [ask.alone() for ask in asks]

        def observe_together(self, observations):
            pass

    for drafter, message in (
        (Joint(spoil=lambda drafts: drafts[1:]), "1 joint drafts for 2 asks"),
        (Joint(spoil=longer), "8 joint drafts of one row for cap 4"),
        (Joint(spoil=other), "otherwise together than alone"),
        (Moving(), "moved a drafter on"),
        (Unrelated(), "the same kin"),
        (Blind(), "otherwise after rows seen together"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_drafter(drafter, vocab_size=12, n_draws=0)
