"""Rows of a batch against `generate`, on a toy target; `spec-targets` tests real models."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

from spec_core import Draft, FixedCap, Pair, Sampling, TargetOutput, generate, shared
from spec_core.batch import Batch, BatchTarget
from spec_core.errors import StateError
from spec_core.guide import TokenBias
from spec_core.host import host_ints
from spec_core.lending import Lender
from spec_core.testing import ToyDrafter, ToyTarget, check_drafter


@dataclass
class ToyRows:
    singles: list
    is_open: bool = False


class ToyBatchTarget(ToyTarget):
    """A batch is a list of single caches."""

    batch_refusal = None

    def join(self, caches):
        return ToyRows([c for p in caches for c in (p.singles if isinstance(p, ToyRows) else [p])])

    def select(self, cache, rows):
        return ToyRows([cache.singles[row] for row in rows])

    def extract(self, cache, row):
        return cache.singles[row]

    def verify_rows(self, blocks, cache, *, taps=()):
        outputs = [self.verify(b, c, taps=taps) for b, c in zip(blocks, cache.singles, strict=True)]
        cache.is_open = True
        columns = zip(*(o.taps for o in outputs), strict=True)
        tapped = tuple(mx.stack(list(column)) for column in columns)
        return TargetOutput(mx.stack([o.logits for o in outputs]), tapped)

    def commit_rows(self, cache, n_keep):
        cache.is_open = False
        for single, n in zip(cache.singles, n_keep, strict=True):
            self.commit(single, n)


def settings(seed):
    samplings = (Sampling(), Sampling(temperature=1.0, seed=seed), Sampling(presence_penalty=0.5))
    return {
        "prompt": [1 + seed % 5, 2, 3 + seed % 4] * (1 + seed % 3),
        "max_tokens": 6 + 5 * (seed % 4),
        "sampling": samplings[seed % 3],
        "cap": FixedCap((3, 0, 2)[seed % 3]),
        "stop_ids": (11,) if seed % 2 else (),
        "guide": TokenBias({seed % 12: -2.0}, 12) if seed % 4 == 1 else None,
        "prefill_chunk": 4,
    }


def drafter(seed):
    return ToyDrafter(taps=(1, 3)) if seed % 2 else ToyDrafter(taps=(2,))


def alone(target, seed):
    given = settings(seed)
    rounds = list(generate(Pair(target, drafter(seed)), given.pop("prompt"), **given))
    return [t for r in rounds for t in r.tokens], rounds[-1].finish_reason


def run(batch, target, seeds, drafter_of=drafter):
    got = {seed: [] for seed in seeds}
    widths, ends = [], {}
    for seed in seeds:
        given = settings(seed)
        batch.add(Pair(target, drafter_of(seed)), given.pop("prompt"), **given, tag=seed)
    while batch.rows:
        for row, outcome in batch.step():
            assert not isinstance(outcome, Exception), outcome
            got[row.tag] += outcome.tokens
            if outcome.finish_reason:
                ends[row.tag] = outcome.finish_reason
                batch.remove(row)
        widths.append(batch.width)
    return {seed: (got[seed], ends[seed]) for seed in seeds}, widths


def test_rows_emit_what_they_emit_alone():
    target = ToyBatchTarget()
    assert isinstance(target, BatchTarget)
    got, widths = run(Batch(target), target, range(9))
    assert max(widths) >= 3 and widths[-1] == 0
    assert got == {seed: alone(target, seed) for seed in range(9)}


@pytest.mark.parametrize("share", [True, False])
def test_targets_that_cannot_batch_take_turns(share):
    target = ToyTarget() if share else ToyBatchTarget()
    batch = Batch(target, share=share)
    got, widths = run(batch, target, range(4))
    assert batch.refusal is not None and max(widths) == 1
    assert got == {seed: alone(target, seed) for seed in range(4)}


def test_a_refusing_target_says_why():
    target = ToyBatchTarget()
    target.batch_refusal = "it is Monday"
    assert Batch(target).refusal == "it is Monday"


def test_a_lent_drafter_keeps_each_sequence_apart():
    target = ToyBatchTarget()
    lender = Lender(ToyDrafter(taps=(1,)))
    got, _ = run(Batch(target), target, range(6), lambda seed: lender.lend())
    want = {}
    for seed in range(6):
        given = settings(seed)
        pair = Pair(target, ToyDrafter(taps=(1,)))
        rounds = list(generate(pair, given.pop("prompt"), **given))
        want[seed] = ([t for r in rounds for t in r.tokens], rounds[-1].finish_reason)
    assert got == want


def test_a_drafter_that_forks_is_forked():
    class Forking(ToyDrafter):
        def fork(self):
            return Forking()

    lender = Lender(Forking())
    assert lender.lend() is not lender.lend() and isinstance(lender.lend(), Forking)


def test_the_conformance_kit_finds_a_fork_that_shares_its_context():
    class Shared(ToyDrafter):
        def draft(self, anchor, cap, *, sampling, key):  # depends on what was observed
            return super().draft(sum(self.observed) % 12, cap, sampling=sampling, key=key)

        def fork(self):
            return self

    class Own(Shared):
        def fork(self):
            return Own()

    check_drafter(Own(), vocab_size=12)
    with pytest.raises(AssertionError, match="fork"):
        check_drafter(Shared(), vocab_size=12)


def test_a_lent_drafter_can_be_snapshot_and_reset():
    lender = Lender(ToyDrafter())
    one, other = lender.lend(), lender.lend()
    one.observe([1, 2], TargetOutput(mx.zeros((2, 1))))
    other.observe([3], TargetOutput(mx.zeros((1, 1))))
    assert (one.state(), other.state()) == ([1, 2], [3])
    one.reset()
    other.restore([7])
    assert (one.state(), other.state()) == ([], [7])
    assert (one.name, one.taps, one.max_draft) == ("toy", (), 4)


class BrokenDrafter(ToyDrafter):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def draft(self, anchor, cap, *, sampling, key):
        if self.where == "draft":
            raise RuntimeError("boom")
        return super().draft(anchor, cap, sampling=sampling, key=key)

    def observe(self, tokens, output):
        prompt = len(self.observed) < 3
        if (self.where == "prefill") if prompt else (self.where == "observe"):
            raise RuntimeError("boom")
        super().observe(tokens, output)


class NanGuide(TokenBias):
    """Spoils the logits after the first token."""

    def __init__(self):
        super().__init__({}, 12)

    def advance(self, tokens):
        self._row = self._row + mx.nan


@pytest.mark.parametrize("where", ["draft", "observe", "prefill", "logits"])
def test_a_failing_row_fails_alone(where):
    target = ToyBatchTarget()
    batch = Batch(target)
    for seed in (3, 7):  # the longest ones
        given = settings(seed)
        batch.add(Pair(target, drafter(seed)), given.pop("prompt"), **given, tag=seed)
    bad = batch.add(
        Pair(target, BrokenDrafter(where)), [1, 2, 3], max_tokens=30, tag="bad",
        guide=NanGuide() if where == "logits" else None,
    )  # fmt: skip
    got, errors = {3: [], 7: []}, []
    while batch.rows:
        for row, outcome in batch.step():
            if isinstance(outcome, Exception):
                errors.append((row, str(outcome)))
                batch.remove(row)
                continue
            if row is not bad:
                got[row.tag] += outcome.tokens
            if outcome.finish_reason:
                batch.remove(row)
    assert len(errors) == 1 and errors[0][0] is bad
    assert ("logits must be numbers" if where == "logits" else "boom") in errors[0][1]
    assert got == {seed: alone(target, seed)[0] for seed in (3, 7)}


def test_a_failed_forward_is_repeated_row_by_row():
    class Fragile(ToyBatchTarget):
        n_calls = 0

        def verify_rows(self, blocks, cache, *, taps=()):
            output = super().verify_rows(blocks, cache, taps=taps)
            self.n_calls += 1
            if self.n_calls == 2:
                raise RuntimeError("no memory")
            return output

    target = Fragile()
    got, _ = run(Batch(target), target, range(6))
    assert target.n_calls > 3
    assert got == {seed: alone(target, seed) for seed in range(6)}


@pytest.mark.parametrize(("n_rows", "length", "at_once"), [(4, 5, 4), (4, 200, 2), (3, 600, 1)])
def test_short_prompts_join_together_and_long_ones_let_others_go_on(n_rows, length, at_once):
    target = ToyBatchTarget()
    batch = Batch(target)
    for i in range(n_rows):
        batch.add(
            Pair(target), [1 + i] * length, max_tokens=9, stop_ids=(), prefill_chunk=512, tag=i
        )
    prompts = sum(outcome.kind == "prefill" for _, outcome in batch.step())
    assert prompts == (at_once if length < 512 else 0)
    begun = [row.tag for row in batch.rows if row.run.cache.offset]
    assert begun == list(range(at_once))
    got = [[] for _ in range(n_rows)]
    drain(batch, [*got])


def test_a_row_can_leave_at_any_time():
    target = ToyBatchTarget()
    batch = Batch(target)
    rows = [batch.add(Pair(target), [1, 2, 3, 4, 5], max_tokens=50, prefill_chunk=2) for _ in "abc"]
    assert batch.remove(rows[2]).offset == 0  # its prompt was never begun
    batch.step()
    assert batch.remove(rows[1]).offset == 0
    for _ in range(6):
        batch.step()
    assert rows[0].run.in_flight
    cache = batch.remove(rows[0])
    assert not cache.is_open and cache.offset == 5 + rows[0].run.n_emitted - 1
    assert batch.rows == [] and batch.step() == []


def test_a_cache_that_cannot_be_closed_is_not_handed_out():
    class Stuck(ToyTarget):
        def commit(self, cache, n_keep):
            if n_keep == 0:
                raise RuntimeError("stuck")
            super().commit(cache, n_keep)

    target = Stuck()
    batch = Batch(target)
    row = batch.add(Pair(target), [1, 2], max_tokens=50)
    for _ in range(3):
        batch.step()
    assert row.run.in_flight and batch.remove(row) is None


def test_progress_is_told_and_stops_are_named():
    class Letters:
        stop_ids = frozenset()

        def encode(self, text):
            return [ord(c) - 97 for c in text]

        def decode(self, tokens):
            return "".join(chr(97 + t) for t in tokens)

    seen = []
    target = ToyTarget()
    batch = Batch(target)
    row = batch.add(
        Pair(target, tokenizer=Letters()), "abcde", max_tokens=200, stop_strings=("zz", "a", "b"),
        prefill_chunk=2, on_prefill=lambda r, done, total: seen.append((r.tag, done, total)),
        sampling=Sampling(temperature=5.0, seed=1), tag="t",
    )  # fmt: skip
    text, reason = "", None
    while reason is None:
        for _, outcome in batch.step():
            text, reason = text + outcome.text, outcome.finish_reason
    assert seen == [("t", 2, 5), ("t", 4, 5), ("t", 5, 5)]
    assert reason == "stop" and row.stopped_by in ("a", "b") and row.stopped_by not in text
    bare = batch.add(Pair(target), [1], max_tokens=1)
    assert bare.stopped_by is None


class Watched(ToyBatchTarget):
    """Notes forwards, and whether a drafted one was among them."""

    def __init__(self):
        super().__init__()
        self.events = []

    def verify_rows(self, blocks, cache, *, taps=()):
        self.events.append(f"verify {blocks.shape[1]}")
        return super().verify_rows(blocks, cache, taps=taps)


@pytest.fixture
def reads(monkeypatch):
    """Makes reads of shared rounds seen, and lets one of them fail."""
    plan = {"events": None, "fail_at": None, "n": 0}

    def read(array):
        plan["n"] += 1
        if plan["events"] is not None:
            plan["events"].append("read")
        if plan["n"] == plan["fail_at"]:
            raise RuntimeError("[malloc] no memory")
        return host_ints(array)

    monkeypatch.setattr(shared, "host_ints", read)
    return plan


def plain_rows(batch, target, n_tokens=(9, 14, 20), **more):
    prompts = [[1 + i, 2, 3] for i in range(len(n_tokens))]
    for i, (prompt, n) in enumerate(zip(prompts, n_tokens, strict=True)):
        batch.add(Pair(target), prompt, max_tokens=n, stop_ids=(), tag=i, **more)
    wanted = []
    for prompt, n in zip(prompts, n_tokens, strict=True):
        rounds = generate(Pair(target), prompt, max_tokens=n, stop_ids=(), **more)
        wanted.append([t for r in rounds for t in r.tokens])
    return wanted


def drain(batch, got, errors=None, cancel=None):
    while batch.rows:
        for row, outcome in batch.step():
            if isinstance(outcome, Exception):
                assert errors is not None, outcome
                errors.append((row, outcome))
                batch.remove(row)
                continue
            got[row.tag] += outcome.tokens
            if outcome.finish_reason:
                cache = batch.remove(row)
                assert cache.offset == row.run.n_emitted - 1 + len(row.run.request.prompt)
        if cancel is not None:
            cancel()


def test_plain_rounds_are_enqueued_before_the_one_ahead_is_read(reads):
    target = Watched()
    batch = Batch(target)
    wanted = plain_rows(batch, target)
    reads["events"] = target.events
    got = [[], [], []]
    drain(batch, got)
    assert got == wanted
    ahead = most = 0
    for event in target.events:
        ahead += 1 if event.startswith("verify") else -1
        most = max(most, ahead)
        assert ahead >= 0
    assert most == 2
    n = len(target.events)
    alternating = sum(a != b for a, b in zip(target.events, target.events[1:], strict=False))
    assert alternating > 0.7 * n


def test_rounds_are_not_enqueued_ahead_where_copies_cost_more_than_the_host(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(shared.time, "perf_counter", lambda: now[0])

    class Copying(ToyBatchTarget):
        batch = None

        def commit_rows(self, cache, n_keep):
            super().commit_rows(cache, n_keep)
            now[0] += 0.010

        def verify_rows(self, blocks, cache, *, taps=()):
            ahead = self.batch is not None and self.batch._shared._closing
            now[0] += self.copy_s if ahead else 0.004
            return super().verify_rows(blocks, cache, taps=taps)

    shares = {}
    for copy_s in (0.0, 0.050):
        target = Copying()
        target.copy_s = copy_s
        batch = target.batch = Batch(target)
        wanted = plain_rows(batch, target, n_tokens=(300, 300))
        behind = []
        take_off = batch._shared._take_off

        def watched(ahead, take_off=take_off, behind=behind, batch=batch):
            behind.append(ahead is not None)
            batch._shared._closing = ahead is not None
            return take_off(ahead)

        batch._shared._closing = False
        batch._shared._take_off = watched
        got = [[], []]
        drain(batch, got)
        assert got == wanted
        shares[copy_s] = sum(behind) / len(behind)
    assert shares[0.0] > 0.9 and shares[0.050] < 0.3


def test_rounds_that_may_draft_are_not_enqueued_ahead(reads):
    target = Watched()
    batch = Batch(target)
    for i in range(3):
        batch.add(Pair(target, ToyDrafter()), [1 + i, 2], max_tokens=12, stop_ids=(), tag=i)
    reads["events"] = target.events
    got = [[], [], []]
    drain(batch, got)
    assert "verify verify" not in " ".join(e.split()[0] for e in target.events[:-2])
    assert max(int(e.split()[1]) for e in target.events if e != "read") > 1


@pytest.mark.parametrize("seed", [None, 5])
def test_sampled_rows_draw_together_what_they_draw_alone(seed):
    target = ToyBatchTarget()
    batch = Batch(target)
    sampling = Sampling(temperature=0.9, top_p=0.9, seed=seed)
    wanted = plain_rows(batch, target, sampling=sampling)
    got = [[], [], []]
    drain(batch, got)
    assert [len(one) for one in got] == [len(one) for one in wanted]
    if seed is not None:
        assert got == wanted


def test_a_row_that_is_cancelled_in_flight_leaves_the_others_alone():
    target = ToyBatchTarget()
    batch = Batch(target)
    wanted = plain_rows(batch, target, n_tokens=(30, 30, 25, 28))
    got, kept, rows = [[], [], [], []], [], {}

    def cancel():
        rows.update({row.tag: row for row in batch.rows})
        if len(got[0]) == 8 and 0 in rows and len(rows) == 4 and not kept:
            assert batch._shared.in_flight
            kept.append(batch.remove(rows[0]))
            kept.append(batch.remove(rows[1]))

    drain(batch, got, cancel=cancel)
    assert got[2] == wanted[2] and got[3] == wanted[3] and got[0] == wanted[0][:8]
    assert kept[0].offset == 3 + 8 - 1 and kept[1] is None  # its step could not be taken back


def test_a_device_that_fails_while_a_step_is_ahead_fails_the_rows_it_held(reads):
    target = ToyBatchTarget()
    batch = Batch(target)
    plain_rows(batch, target, n_tokens=(30, 30))
    got, errors = [[], []], []
    reads["fail_at"] = 4
    drain(batch, got, errors)
    assert len(errors) == 2 and all("no memory" in str(e) for _, e in errors)
    assert all(batch.remove(row) is None for row, _ in errors)
    again, fresh = plain_rows(batch, target, n_tokens=(6, 7)), [[], []]
    drain(batch, fresh)
    assert fresh == again


def test_a_device_that_fails_in_a_drafted_round_costs_nothing(reads):
    target = ToyBatchTarget()
    reads["fail_at"] = 3
    got, _ = run(Batch(target), target, [3, 6, 7])
    assert reads["n"] >= 3
    assert got == {seed: alone(target, seed) for seed in [3, 6, 7]}


def test_a_step_ahead_that_breaks_off_is_taken_back():
    class Fragile(ToyBatchTarget):
        n_calls = 0

        def verify_rows(self, blocks, cache, *, taps=()):
            self.n_calls += 1
            if self.n_calls in (3, 4, 7):
                raise RuntimeError("a layer broke")
            return super().verify_rows(blocks, cache, taps=taps)

    target = Fragile()
    batch = Batch(target)
    wanted = plain_rows(batch, target, sampling=Sampling(temperature=1.0, seed=3))
    got = [[], [], []]
    drain(batch, got)
    assert got == wanted and target.n_calls > 8


class SureDrafter(ToyDrafter):
    """States a confidence, one more digit per position."""

    def draft(self, anchor, cap, *, sampling, key):
        draft = super().draft(anchor, cap, sampling=sampling, key=key)
        sure = mx.arange(1, draft.n_drafted + 1) / 10
        return Draft(draft.tokens, draft.probs, sure, draft.source)


def test_confidence_comes_over_with_the_round():
    target = ToyBatchTarget()
    batch = Batch(target)
    for i, kind in enumerate((SureDrafter, ToyDrafter, SureDrafter)):
        sampling = Sampling(temperature=float(i == 2), seed=1)
        batch.add(Pair(target, kind()), [1, 2, 3], max_tokens=20, cap=FixedCap(2 + i % 2),
                  sampling=sampling, stop_ids=(), tag=i)  # fmt: skip
    n_seen = 0
    while batch.rows:
        for row, round_ in batch.step():
            if round_.n_drafted and row.tag != 1:
                want = [(k + 1) / 10 for k in range(round_.n_drafted)]
                assert round_.confidence == pytest.approx(want)
                n_seen += 1
            else:
                assert not round_.confidence
            if round_.finish_reason:
                batch.remove(row)
    assert n_seen > 5


def test_a_crowd_bounds_the_drafts_of_rows_and_learns_from_rounds():
    class Two:
        def __init__(self):
            self.told, self.solo = [], 0

        def cap(self, width):
            return 2

        def observe(self, width, cap, rounds, seconds):
            self.told.append((width, cap, max(r.n_drafted for r in rounds), seconds > 0))

        def saw(self, round_):
            self.solo += 1

    target, crowd = ToyBatchTarget(), Two()
    batch = Batch(target, crowd=crowd)
    for i in range(3):
        batch.add(Pair(target, ToyDrafter()), [1 + i, 2], max_tokens=20 + 6 * i, stop_ids=(), tag=i)
    drain(batch, [[], [], []])
    assert crowd.told and all(t[1] == 2 and t[2] <= 2 and t[3] for t in crowd.told)
    assert {t[0] for t in crowd.told} <= {2, 3} and crowd.solo > 0


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("how", ["finished", "failed"])
def test_a_row_that_ended_must_be_removed_before_the_next_step(how, share):
    target = ToyBatchTarget()
    batch = Batch(target, share=share)
    batch.add(Pair(target), [1, 2], max_tokens=30)
    drafter = BrokenDrafter("prefill") if how == "failed" else None
    row = batch.add(Pair(target, drafter), [1, 2], max_tokens=4)
    for _ in range(20):
        ended = [r for r, o in batch.step() if isinstance(o, Exception) or o.finish_reason]
        if ended:
            break
    assert ended == [row]
    with pytest.raises(StateError, match="A row that ended must be removed before the next step"):
        batch.step()
    batch.remove(row)
    assert batch.step()


def test_logits_of_a_prompt_come_in_blocks_that_the_target_verifies_at_once():
    class Narrow(ToyTarget):
        max_block = 4

        def verify(self, block, cache, *, taps=()):
            assert block.shape[0] <= 4
            return super().verify(block, cache, taps=taps)

    prompt, seen = [(3 * i) % 12 for i in range(11)], []
    batch = Batch(Narrow())
    row = batch.add(
        Pair(Narrow()), prompt, max_tokens=1, on_prompt_logits=lambda at, x: seen.append((at, x))
    )
    while not row.ended:
        batch.step()
    assert [(at, x.shape[0]) for at, x in seen] == [(0, 4), (4, 4), (8, 3)]
    target = ToyTarget()
    whole = target.verify(mx.array(prompt), target.make_cache()).logits
    assert mx.array_equal(mx.concatenate([x for _, x in seen]), whole)
