"""When the loop enqueues, reads and commits; what a generation leaves when it is left early."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from spec_core import (
    Draft,
    FixedCap,
    NumericsError,
    Pair,
    Round,
    Sampling,
    TargetOutput,
    generate,
    target_probs,
)
from spec_core import loop as loop_module
from spec_core.testing import ScriptedDrafter, ToyCache, ToyDrafter, ToyTarget

PROMPT = [1, 5, 2]


class RecordingTarget(ToyTarget):
    """Writes down what is called, in order."""

    def __init__(self, **arguments: float) -> None:
        super().__init__(**arguments)
        self.calls: list[str] = []

    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        output = super().prefill(tokens, cache, taps=taps)
        self.calls[-2:] = [f"prefill {len(tokens)}"]
        return output

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        self.calls.append(f"verify {block.shape[0]}")
        return super().verify(block, cache, taps=taps)

    def commit(self, cache: ToyCache, n_keep: int) -> None:
        self.calls.append(f"commit {n_keep}")
        super().commit(cache, n_keep)


@pytest.fixture(name="reads")
def _reads(monkeypatch) -> list[str]:
    """Every device read of the loop, written to the calls of the recording target."""
    calls: list[str] = []
    real = loop_module.host_ints

    def host_ints(array: mx.array) -> list[int]:
        calls.append("read")
        return real(array)

    monkeypatch.setattr(loop_module, "host_ints", host_ints)
    return calls


def run(target: ToyTarget, drafter=None, max_tokens: int = 12, **arguments) -> list[Round]:
    return list(generate(Pair(target, drafter), PROMPT, max_tokens=max_tokens, **arguments))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.tokens]


def greedy_answer(n: int) -> list[int]:
    """Plain greedy decoding, written out."""
    target, answer = ToyTarget(), []
    before = [*PROMPT]
    for _ in range(n):
        answer.append(int(mx.argmax(target.table[before[-2], before[-1]]).item()))
        before.append(answer[-1])
    return answer


def test_plain_steps_are_enqueued_before_the_token_before_them_is_read(reads):
    target = RecordingTarget()
    target.calls = reads
    run(target, max_tokens=4)
    assert reads == [
        *("prefill 3", "read"),
        *("verify 1", "commit 1", "verify 1", "read"),
        *("commit 1", "verify 1", "read"),
        *("read", "commit 1"),
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
@pytest.mark.parametrize("cap", [0, 1, 4])
def test_a_round_reads_the_device_once(reads, sampling, cap):
    rounds = run(ToyTarget(), ToyDrafter(), max_tokens=30, sampling=sampling, cap=FixedCap(cap))
    assert len(rounds) > 6
    assert reads == ["read"] * len(rounds)


@pytest.mark.parametrize("stop_after", range(1, 9))
@pytest.mark.parametrize("cap", [0, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_generation_left_early_leaves_its_cache_closed_and_true(stop_after, cap, penalty):
    target, drafter = ToyTarget(), ScriptedDrafter(greedy_answer(40), 3, 12, 3, wrong_at=[2])
    cache = target.make_cache()
    sampling = Sampling(repetition_penalty=penalty)
    rounds = generate(
        Pair(target, drafter), PROMPT, sampling=sampling, cache=cache, cap=FixedCap(cap)
    )
    taken = tokens_of([next(rounds) for _ in range(stop_after)])
    rounds.close()
    assert not cache.is_open
    assert cache.tokens.tolist() == PROMPT + taken[:-1]
    assert drafter.observed == PROMPT + taken[:-1]


def test_a_generation_that_is_never_started_touches_no_cache():
    target = ToyTarget()
    cache = target.make_cache()
    generate(Pair(target), PROMPT, cache=cache)
    assert cache.offset == 0


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("wrong_at", [(), (1,), (2,), (1, 3), (6,)])
def test_greedy_ids_do_not_depend_on_the_cap_or_on_wrong_drafts(cap, wrong_at):
    answer = greedy_answer(40)
    drafter = ScriptedDrafter(answer, 3, 12, 6, wrong_at)
    rounds = run(ToyTarget(), drafter, max_tokens=40, cap=FixedCap(cap))
    assert tokens_of(rounds) == answer
    assert max(r.n_drafted for r in rounds) == min(cap, 6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1e-9)])
def test_a_perfect_drafter_is_accepted_whole_at_temperature_zero(sampling):
    rounds = run(ToyTarget(), ScriptedDrafter(greedy_answer(29), 3, 12, 6), 29, sampling=sampling)
    assert [len(r.tokens) for r in rounds] == [1, 7, 7, 7, 7]
    assert all(r.n_accepted == r.n_drafted for r in rounds)


class Twin(ToyDrafter):
    """Draws from the target's own rows."""

    def __init__(self, target: ToyTarget) -> None:
        super().__init__()
        self.target = target

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        before, rows = [self.observed[-1], anchor], []
        for step_key in mx.random.split(key, cap):
            logits = self.target.table[before[-2], before[-1]]
            rows.append(target_probs(logits[None], sampling)[0])
            before.append(int(mx.random.categorical(mx.log(rows[-1]), key=step_key).item()))
        return Draft(mx.array(before[2:], mx.int32), mx.stack(rows))


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_a_drafter_that_draws_from_the_target_itself_is_accepted_whole(settings):
    target, sampling = ToyTarget(), Sampling(temperature=1.3, seed=5, **settings)
    rounds = run(target, Twin(target), 41, sampling=sampling)
    assert [len(r.tokens) for r in rounds] == [1, *[5] * 8]


def test_the_cap_of_the_last_round_fits_the_tokens_left():
    rounds = run(ToyTarget(), ScriptedDrafter(greedy_answer(20), 3, 12, 6), max_tokens=10)
    assert [(r.n_drafted, len(r.tokens)) for r in rounds] == [(0, 1), (6, 7), (1, 2)]


class Caps:
    """A cap that follows a list and starts it again; counts how often it is asked."""

    def __init__(self, *caps: int) -> None:
        self.caps, self.n_asked = caps, 0

    def next(self) -> int:
        self.n_asked += 1
        return self.caps[(self.n_asked - 1) % len(self.caps)]

    def observe(self, round_: Round) -> None:
        self.last = round_


@pytest.mark.parametrize("caps", [(0, 0, 3, 0, 2), (2, 0, 0, 0, 1), (0, 1), (-5, 2, 0), (99, 0)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(presence_penalty=0.4)])
def test_a_cap_is_asked_once_a_round_and_followed(caps, sampling):
    plain = tokens_of(run(ToyTarget(), max_tokens=25, sampling=sampling))
    cap = Caps(*caps)
    rounds = run(ToyTarget(), ToyDrafter(), max_tokens=25, sampling=sampling, cap=cap)
    assert tokens_of(rounds) == plain
    assert cap.last is rounds[-1]
    steps = rounds[1:]
    assert cap.n_asked == len(steps)
    for at, round_ in enumerate(steps[:-4]):  # the last ones are held down by the tokens left
        assert round_.n_drafted == min(max(caps[at % len(caps)], 0), 4)
        assert round_.kind == ("verify" if round_.n_drafted else "plain")


def test_a_cap_that_reports_a_length_of_zero_is_still_used():
    class EmptyCap(Caps):
        def __len__(self) -> int:
            return 0

    rounds = run(ToyTarget(), ToyDrafter(), cap=EmptyCap(0))
    assert {r.kind for r in rounds[1:]} == {"plain"}


class Checking(ToyDrafter):
    """Checks that it observes committed rows: ids in order and the taps that belong to them."""

    def __init__(self, target: ToyTarget) -> None:
        super().__init__(taps=(0, 3))
        self.target = target
        self.logits: list[mx.array] = []

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        hidden = self.target.embed(mx.array(tokens))
        assert len(output.taps) == 2
        assert mx.array_equal(output.taps[0], hidden)
        assert mx.array_equal(output.taps[1], hidden + 3)
        super().observe(tokens, output)


@pytest.mark.parametrize("cap", [0, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1)])
def test_a_drafter_observes_committed_rows_and_their_taps(cap, sampling):
    target = ToyTarget()
    drafter = Checking(target)
    rounds = run(target, drafter, 30, cap=FixedCap(cap), sampling=sampling, prefill_chunk=2)
    assert drafter.observed == PROMPT + tokens_of(rounds)[:-1]


class Silent(ToyDrafter):
    """Has nothing to propose."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        return Draft(mx.zeros((0,), mx.int32), source="silent")


def test_a_drafter_with_nothing_to_propose_costs_plain_steps():
    rounds = run(ToyTarget(), Silent())
    assert tokens_of(rounds) == greedy_answer(12)
    assert [(r.kind, r.source) for r in rounds[1:]] == [("plain", "silent")] * 10 + [
        ("plain", "target")  # the last token leaves no room for a draft
    ]


class Greedy(ToyDrafter):
    """Proposes more than it was asked for."""

    name = "greedy"

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        return Draft(mx.zeros((cap + 1,), mx.int32))


def test_a_drafter_that_proposes_more_than_the_cap_is_named():
    with pytest.raises(ValueError) as error:
        run(ToyTarget(), Greedy(), cap=FixedCap(2))
    assert str(error.value) == '[draft] Drafter "greedy" must propose at most 2 tokens, got 3.'


class Misshapen(ToyDrafter):
    """Spoils one part of its drafts."""

    def __init__(self, **parts: Callable[[Draft], mx.array | str]) -> None:
        super().__init__()
        self.parts = parts

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        draft = super().draft(anchor, cap, sampling=sampling, key=key)
        return replace(draft, **{name: spoil(draft) for name, spoil in self.parts.items()})


@pytest.mark.parametrize(
    ("part", "spoil", "got"),
    [
        ("tokens", lambda d: d.tokens[None], r"\(1, 2\) of mlx.core.int32, \(2, 12\) and None"),
        ("tokens", lambda d: d.tokens + 0.5, r"\(2,\) of mlx.core.float32"),
        ("probs", lambda d: d.probs[:1], r"int32, \(1, 12\) and None"),  # the others' rows are read
        ("probs", lambda d: d.probs[:, :5], r"int32, \(2, 5\) and None"),
        ("confidence", lambda d: mx.zeros((1,)), r"\(2, 12\) and \(1,\)"),
    ],
)
def test_a_draft_of_other_shapes_is_refused_by_the_drafters_name(part, spoil, got):
    drafter = Misshapen(**{part: spoil})
    with pytest.raises(ValueError, match=rf'Drafter "toy" must give K whole .*12.* got .*{got}'):
        run(ToyTarget(), drafter, cap=FixedCap(2), sampling=Sampling(temperature=1.0))


def test_drafts_without_a_source_come_from_their_drafter():
    rounds = run(ToyTarget(), Misshapen(source=lambda draft: ""), cap=FixedCap(2))
    assert {r.source for r in rounds if r.n_drafted} == {"toy"}


class Lost(ToyDrafter):
    """Drafts ids that are in no vocabulary."""

    def __init__(self, token: int, with_probs: bool) -> None:
        super().__init__()
        self.token, self.with_probs = token, with_probs

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        probs = mx.full((cap, 12), 1 / 12) if self.with_probs else None
        return Draft(mx.full((cap,), self.token, mx.int32), probs)


@pytest.mark.parametrize("token", [12, 10**8])
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"presence_penalty": 0.5}])
def test_drafts_outside_the_vocabulary_are_rejected(token, with_probs, settings):
    rounds = run(ToyTarget(), Lost(token, with_probs), 30, sampling=Sampling(**settings))
    assert all(0 <= t < 12 for t in tokens_of(rounds))
    assert all(r.n_accepted == 0 for r in rounds)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"presence_penalty": 0.5}])
def test_a_drafter_without_numbers_is_named_once_and_parked(with_probs, settings):
    with pytest.warns(RuntimeWarning, match='Drafter "toy" must compute numbers') as remarks:
        rounds = run(ToyTarget(), Lost(-1, with_probs), 30, sampling=Sampling(**settings))
    assert len(remarks) == 1
    assert [r.n_drafted > 0 for r in rounds] == [False, True, *[False] * 28]
    assert all(0 <= t < 12 for t in tokens_of(rounds))


class BrokenHead(ToyTarget):
    """Answers with a bad row after a given number of committed tokens."""

    def __init__(self, after: int, bad: float, everywhere: bool, dtype: mx.Dtype) -> None:
        super().__init__()
        self.after, self.bad, self.everywhere, self.dtype = after, bad, everywhere, dtype

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        start = cache.offset
        logits = super().verify(block, cache, taps=taps).logits.astype(self.dtype)
        row = self.after - start
        if 0 <= row < logits.shape[0]:
            if self.everywhere:
                logits[row] = self.bad
            else:
                logits[row, 7] = self.bad
        return TargetOutput(logits)


BAD_ROWS = [(mx.nan, False), (mx.nan, True), (mx.inf, False), (mx.inf, True), (-mx.inf, True)]


@pytest.mark.parametrize("after", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(("bad", "everywhere"), BAD_ROWS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("cap", [0, 3])
def test_logits_that_are_no_numbers_end_in_an_error_and_leave_no_garbage(
    after, bad, everywhere, settings, cap
):
    target = BrokenHead(after, bad, everywhere, mx.float16)
    drafter = ScriptedDrafter(greedy_answer(20), 3, 12, 3)
    cache, taken = target.make_cache(), []
    rounds = generate(
        *(Pair(target, drafter), PROMPT),
        sampling=Sampling(**settings),
        cache=cache,
        cap=FixedCap(cap),
    )
    with pytest.raises(NumericsError) as error:
        for round_ in rounds:
            taken += round_.tokens
    assert str(error.value) == (
        "[generate] The target's logits must be numbers, got NaN or infinity. The weights, the "
        "compute type or a penalty overflow; no token was taken from them."
    )
    assert not cache.is_open
    assert cache.tokens.tolist() == (PROMPT + taken)[: cache.offset]
    assert cache.offset <= after + 1
    assert all(0 <= t < 12 for t in taken)


def test_masked_logits_are_numbers_enough():
    target = ToyTarget()
    target.table[..., 3:] = -mx.inf
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9), Sampling(min_p=0.1)):
        assert max(tokens_of(run(target, ToyDrafter(), 20, sampling=sampling))) < 3


def test_a_bad_row_behind_a_rejected_draft_does_not_matter():
    target = BrokenHead(5, mx.nan, True, mx.float32)
    rounds = generate(
        Pair(target, ScriptedDrafter(greedy_answer(20), 3, 12, 3, wrong_at=[1])), PROMPT
    )
    assert next(rounds).kind == "prefill"
    assert next(rounds).n_drafted == 3


def test_a_penalty_that_overflows_ends_in_an_error():
    for settings in ({"frequency_penalty": 1e300}, {"repetition_penalty": 1e-300}):
        with pytest.raises(NumericsError, match="a penalty overflow"):
            run(ToyTarget(), sampling=Sampling(temperature=1.0, **settings))
