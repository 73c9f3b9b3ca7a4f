"""What a cap sees of a generation: which rounds, in which order, with which figures."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from spec_core import Draft, Pair, Round, Sampling, generate
from spec_core.toys import ScriptedDrafter, ToyDrafter, ToyTarget

PROMPT = [3, 1, 4, 1]


class _Recorder:
    """A cap that plays a list of caps and keeps what it is shown."""

    def __init__(self, caps: Sequence[int]) -> None:
        self.caps = list(caps)
        self.seen: list[Round] = []

    def next(self) -> int:
        return self.caps[min(len(self.seen), len(self.caps)) - 1]

    def observe(self, round_: Round) -> None:
        self.seen.append(round_)


class _ConfidentDrafter(ToyDrafter):
    """States a confidence that falls with the position."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        draft = super().draft(anchor, cap, sampling=sampling, key=key)
        confidence = 0.9 ** mx.arange(1, draft.n_drafted + 1)
        return Draft(draft.tokens, draft.probs, confidence, "toy")


@pytest.mark.parametrize("caps", [[0], [3], [0, 0, 2, 2, 0, 0, 1]])
def test_the_cap_sees_every_round_the_consumer_sees(caps: list[int]):
    cap = _Recorder(caps)
    rounds = list(generate(Pair(ToyTarget(), ToyDrafter()), PROMPT, max_tokens=20, cap=cap))
    assert cap.seen == rounds
    assert [r.kind for r in rounds].count("prefill") == 1 and rounds[0].kind == "prefill"


@pytest.mark.parametrize("caps", [[0], [3], [0, 0, 2, 2, 0, 0, 1]])
def test_offset_counts_committed_tokens_in_pipelined_and_verified_rounds(caps: list[int]):
    pair = Pair(ToyTarget(), ToyDrafter())
    n = len(PROMPT)
    for round_ in generate(pair, PROMPT, max_tokens=20, cap=_Recorder(caps)):
        n += len(round_.tokens)
        assert round_.offset == n - 1  # the newest token is the anchor, not in the cache yet


def test_a_round_says_what_was_asked_for_when_the_drafter_gives_less():
    drafter = ScriptedDrafter([0] * 3, len(PROMPT), vocab_size=12)  # runs out of answer
    rounds = list(generate(Pair(ToyTarget(), drafter), PROMPT, max_tokens=9, cap=_Recorder([4])))
    misses = [r for r in rounds[1:] if r.n_drafted == 0]
    assert misses and all(r.kind == "plain" for r in misses)
    n_emitted = 1
    for round_ in rounds[1:]:
        n_left = 9 - n_emitted
        assert round_.cap == min(4, n_left - 1)
        n_emitted += len(round_.tokens)


def test_a_pipelined_step_asked_for_nothing():
    rounds = list(
        generate(Pair(ToyTarget(), ToyDrafter()), PROMPT, max_tokens=9, cap=_Recorder([0]))
    )
    assert [r.cap for r in rounds] == [0] * 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_comes_over_with_the_round(temperature: float):
    pair = Pair(ToyTarget(), _ConfidentDrafter())
    sampling = Sampling(temperature=temperature, seed=0)
    rounds = list(generate(pair, PROMPT, max_tokens=20, sampling=sampling))
    verified = [r for r in rounds if r.kind == "verify"]
    assert verified and rounds[0].confidence is None
    for round_ in verified:
        expected = [0.9**i for i in range(1, round_.n_drafted + 1)]
        assert round_.confidence == pytest.approx(expected)


def test_confidence_does_not_change_the_tokens():
    plain = [r.tokens for r in generate(Pair(ToyTarget(), ToyDrafter()), PROMPT, max_tokens=20)]
    confident = generate(Pair(ToyTarget(), _ConfidentDrafter()), PROMPT, max_tokens=20)
    assert [r.tokens for r in confident] == plain


def test_a_draft_without_confidence_gives_none():
    answer = [0] * 8
    drafter = ScriptedDrafter(answer, len(PROMPT), vocab_size=12)
    rounds = generate(Pair(ToyTarget(), drafter), PROMPT, max_tokens=8)
    assert all(r.confidence is None for r in rounds)
