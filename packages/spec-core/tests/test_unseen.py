"""What a drafter is shown, and when, while nobody asks it for drafts."""

import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, Sampling, generate
from spec_core.batch import Batch
from spec_core.lending import Lender
from spec_core.testing import ToyDrafter, ToyTarget
from spec_core.unseen import MOST

from .test_asking import Seeing
from .test_batch import ToyBatchTarget


class Watched(ToyDrafter):
    """Notes how many rows each call brings, and what it had seen when it was asked."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls, self.known, self.depths = [], [], []

    def observe(self, tokens, output):
        self.calls.append(len(tokens))
        self.depths.append([tap.shape[0] for tap in output.taps])
        super().observe(tokens, output)

    def draft(self, anchor, cap, *, sampling, key):
        self.known.append(list(self.observed))
        return super().draft(anchor, cap, sampling=sampling, key=key)


class Turns:
    """Caps in turn, the last one from then on."""

    def __init__(self, *caps):
        self.caps = list(caps)

    def next(self):
        return self.caps.pop(0) if len(self.caps) > 1 else self.caps[0]

    def observe(self, round_):
        pass


def ids_of(rounds):
    return [token for round_ in rounds for token in round_.tokens]


def test_rows_of_plain_steps_come_at_once_with_the_next_draft():
    drafter, target = Watched(taps=(1, 3)), ToyTarget()
    rounds = generate(
        Pair(target, drafter), [1, 2, 3], max_tokens=30, stop_ids=(), cap=Turns(*[0] * 10, 3)
    )
    ids = ids_of(rounds)
    assert ids == ids_of(generate(Pair(target), [1, 2, 3], max_tokens=30, stop_ids=()))
    assert drafter.calls[:2] == [3, 10]  # the prompt, then ten plain steps
    assert drafter.depths[1] == [10, 10]
    assert drafter.known[0] == [1, 2, 3, *ids[:10]]
    for seen in drafter.known:
        assert seen == [1, 2, 3, *ids][: len(seen)]
    assert drafter.observed == [1, 2, 3, *ids[:-1]]


def test_no_more_than_so_many_rows_wait():
    drafter = Watched(taps=(2,))
    given = {"max_tokens": 2 * MOST + 6, "stop_ids": (), "cap": FixedCap(0)}
    ids = ids_of(generate(Pair(ToyTarget(), drafter), [1, 2], **given))
    assert drafter.calls == [2, MOST, MOST, 5]
    assert drafter.observed == [1, 2, *ids[:-1]]


def test_a_sampled_rows_drafter_sees_each_step_as_it_comes():
    drafter = Watched(taps=(2,))
    sampling = Sampling(temperature=1.0, seed=3)
    given = {"max_tokens": 9, "stop_ids": (), "cap": FixedCap(0), "sampling": sampling}
    ids_of(generate(Pair(ToyTarget(), drafter), [1, 2], **given))
    assert drafter.calls == [2] + [1] * 8


def test_a_text_that_is_given_up_leaves_a_drafter_that_has_seen_all_of_it():
    drafter, target = Watched(taps=(1,)), ToyTarget()
    cache = target.make_cache()
    given = {"max_tokens": 30, "stop_ids": (), "cap": FixedCap(0), "cache": cache}
    rounds = generate(Pair(target, drafter), [1, 2], **given)
    for _ in range(6):
        next(rounds)
    assert len(drafter.observed) == 2
    rounds.close()
    assert len(drafter.observed) >= 7
    assert len(drafter.observed) <= cache.offset


class Crowd:
    """Parks for a while, then lets three be drafted."""

    def __init__(self, parked):
        self.left = parked

    def cap(self, width):
        self.left -= 1
        return 0 if self.left >= 0 else 3

    def observe(self, width, cap, rounds, seconds):
        pass

    def saw(self, round_):
        pass


def batched(lender, n_rows, parked, *, keep, max_tokens=30):
    target, got = ToyBatchTarget(), [[] for _ in range(n_rows)]
    batch, drafters = Batch(target, crowd=Crowd(parked)), [lender.lend() for _ in range(n_rows)]
    for i, drafter in enumerate(drafters):
        given = {"max_tokens": max_tokens, "stop_ids": (), "cap": FixedCap(3), "tag": i}
        batch.add(Pair(target, drafter), [1 + i, 2], **given)
    caches = []
    while batch.rows:
        for row, round_ in batch.step():
            got[row.tag] += round_.tokens
            if round_.finish_reason:
                caches.append(batch.remove(row, keep=keep))
    return got, drafters, caches


def test_rows_that_share_a_forward_are_shown_together_what_they_have_missed():
    lender = Lender(Seeing())
    got, drafters, _ = batched(lender, 3, parked=8, keep=True)
    for i, (ids, drafter) in enumerate(zip(got, drafters, strict=True)):
        wanted = generate(Pair(ToyTarget()), [1 + i, 2], max_tokens=30, stop_ids=())
        assert ids == ids_of(wanted)
        assert drafter.observed == [1 + i, 2, *ids[:-1]]
    assert lender.drafter.log["observed"][0] == 3  # the first call after the prompts


@pytest.mark.parametrize("keep", [True, False])
def test_a_row_that_is_not_kept_costs_no_more_work(keep):
    lender = Lender(Seeing())
    got, drafters, caches = batched(lender, 2, parked=10**6, keep=keep)
    for ids, drafter, cache in zip(got, drafters, caches, strict=True):
        missed = 2 + len(ids) - 1 - len(drafter.observed)
        assert missed == 0 if keep else missed > 20
        assert (cache is not None) == keep


def test_a_drafter_that_cannot_take_in_what_it_missed_fails_alone():
    class Failing(Seeing):
        def observe(self, tokens, output):
            if self.fault and len(self.observed) >= 2:
                raise RuntimeError("boom")
            super().observe(tokens, output)

    target, lender = ToyBatchTarget(), Lender(Failing())
    batch, got, errors = Batch(target, crowd=Crowd(6)), [[], [], []], []
    for i in range(3):
        drafter = lender.lend()
        drafter.fault = i == 1
        given = {"max_tokens": 25, "stop_ids": (), "cap": FixedCap(3), "tag": i}
        batch.add(Pair(target, drafter), [1 + i, 2], **given)
    while batch.rows:
        for row, outcome in batch.step():
            if isinstance(outcome, Exception):
                errors.append((row.tag, str(outcome)))
                batch.remove(row)
            else:
                got[row.tag] += outcome.tokens
                if outcome.finish_reason:
                    batch.remove(row)
    assert errors == [(1, "boom")]
    for i in (0, 2):
        assert got[i] == ids_of(generate(Pair(target), [1 + i, 2], max_tokens=25, stop_ids=()))
    assert mx.array(got[0]).size == 25


class Bound(Turns):
    """May go as far as three."""

    most = 3


class Once(Crowd):
    """Lets three be drafted in its first round alone."""

    def cap(self, width):
        self.left -= 1
        return 3 if self.left >= 0 else 0


class Falling(ToyBatchTarget):
    """Its first shared forward of blocks breaks off."""

    fell = False

    def verify_rows(self, blocks, cache, *, taps=()):
        if blocks.shape[1] > 1 and not self.fell:
            self.fell = True
            raise RuntimeError("no memory")
        return super().verify_rows(blocks, cache, taps=taps)


def test_what_follows_a_draft_whose_round_broke_off_is_shown_by_itself():
    """A drafter counts the rows that come after its draft as what was accepted of it."""
    target, drafters = Falling(), [Watched(taps=(1,)) for _ in range(2)]
    batch = Batch(target, crowd=Once(1))
    for i, drafter in enumerate(drafters):
        given = {"max_tokens": 30, "stop_ids": (), "cap": Bound(0)}
        batch.add(Pair(target, drafter), [1 + i, 2], **given)
    while batch.rows:
        for row, round_ in batch.step():
            if round_.finish_reason:
                batch.remove(row)
    assert target.fell
    for drafter in drafters:
        assert len(drafter.known) == 1  # asked once, in vain
        assert drafter.calls[:3] == [2, 1, 28]


@pytest.mark.parametrize(
    ("ways", "heard"), [((True,), True), ((False,), True), ((True, False), False)]
)
def test_a_crowd_hears_of_no_round_that_only_fills_or_empties_the_pipeline(
    ways, heard, monkeypatch
):
    """Such rounds take twice as long as others, or no time at all."""
    n, told = [0], []

    def pays(self, width):
        n[0] += 1
        return ways[n[0] % len(ways)]

    class Listening(Crowd):
        def observe(self, width, cap, rounds, seconds):
            told.append(cap)

    monkeypatch.setattr("spec_core.shared.Ahead.pays", pays)
    target, lender = ToyBatchTarget(), Lender(Seeing())
    batch = Batch(target, crowd=Listening(10**6))
    for i in range(2):
        given = {"max_tokens": 20, "stop_ids": (), "cap": FixedCap(3), "tag": i}
        batch.add(Pair(target, lender.lend()), [1 + i, 2], **given)
    for _ in range(12):
        batch.step()
    assert bool(told) == heard and not any(told)
