"""Where a text ends: end token, stop string and token limit at every position of a block."""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from spec_core import Drafter, FixedCap, Pair, Round, Sampling, generate
from spec_core.testing import ScriptedDrafter, ToyTarget

VOCAB = 26
PROMPT = [3, 4]
ANSWER = list(range(5, 5 + 14))  # what CountingTarget continues with: "fghijkl.."
BLOCK = 6


class CountingTarget(ToyTarget):
    """After token t comes t + 1, with a margin of 30."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        following = (mx.arange(VOCAB) + 1) % VOCAB
        ramp = 30.0 * (following[:, None] == mx.arange(VOCAB)[None, :])
        self.table = self.table + ramp[None]


class Letters:
    """Token t is the t-th letter; none of them ends a text."""

    stop_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def scripted(*wrong_at: int, taps: tuple[int, ...] = ()) -> ScriptedDrafter:
    return ScriptedDrafter(ANSWER, len(PROMPT), VOCAB, BLOCK, wrong_at, taps)


MODES = {
    "baseline": lambda: (None, None),
    "baseline by cap": lambda: (scripted(), FixedCap(0)),
    "perfect": lambda: (scripted(), None),
    "perfect, cap 2": lambda: (scripted(), FixedCap(2)),
    "first draft wrong": lambda: (scripted(1), None),
    "third draft wrong": lambda: (scripted(3, 5), None),
    "with taps": lambda: (scripted(4, taps=(0, 2)), None),
}
modes = pytest.mark.parametrize("mode", MODES)
samplings = pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1e-9)], ids=["greedy", "temperature 1e-9"]
)


class Run:
    """One generation to its end, with the cache and the drafter it leaves behind."""

    def __init__(self, mode: str, **arguments: object) -> None:
        self.target = CountingTarget()
        self.drafter: Drafter | None
        self.drafter, cap = MODES[mode]()
        self.cache = self.target.make_cache()
        pair = Pair(self.target, self.drafter, Letters())
        options: dict = {"cap": cap, "cache": self.cache, "max_tokens": 14, **arguments}
        self.rounds: list[Round] = list(generate(pair, PROMPT, **options))
        self.tokens = [token for round_ in self.rounds for token in round_.tokens]
        self.text = "".join(round_.text for round_ in self.rounds)

    @property
    def finish_reason(self) -> str | None:
        assert all(round_.finish_reason is None for round_ in self.rounds[:-1])
        return self.rounds[-1].finish_reason

    def check_what_is_left(self) -> None:
        """The cache and the drafter hold the prompt and all emitted tokens but the last."""
        committed = PROMPT + self.tokens[:-1]
        assert not self.cache.is_open
        assert self.cache.offset == len(committed)
        assert self.cache.tokens.tolist() == committed
        if isinstance(self.drafter, ScriptedDrafter):
            assert self.drafter.observed == committed


@modes
@samplings
@pytest.mark.parametrize("at", range(14))
def test_an_end_token_ends_the_text_at_its_place_in_the_block(mode, sampling, at):
    run = Run(mode, sampling=sampling, stop_ids=[ANSWER[at]])
    assert run.tokens == ANSWER[: at + 1]
    assert run.finish_reason == "stop"
    assert run.text == Letters().decode(ANSWER[:at])
    run.check_what_is_left()


@modes
@pytest.mark.parametrize("at", range(14))
def test_a_stop_string_of_one_token_ends_the_text_before_it(mode, at):
    run = Run(mode, stop_strings=[Letters().decode(ANSWER[at : at + 1])])
    assert run.tokens == ANSWER[: at + 1]
    assert run.finish_reason == "stop"
    assert run.text == Letters().decode(ANSWER[:at])
    run.check_what_is_left()


@modes
@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("at", range(14 - 2))
def test_a_stop_string_over_tokens_and_blocks_is_cut_and_never_shown(mode, length, at):
    if at + length > 14:
        at = 14 - length
    run = Run(mode, stop_strings=["zz", Letters().decode(ANSWER[at : at + length])])
    assert run.tokens == ANSWER[: at + length]
    assert run.finish_reason == "stop"
    assert run.text == Letters().decode(ANSWER[:at])
    run.check_what_is_left()


@modes
@samplings
@pytest.mark.parametrize("limit", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 13])
def test_the_token_limit_ends_the_text_with_exactly_that_many_tokens(mode, sampling, limit):
    run = Run(mode, sampling=sampling, max_tokens=limit)
    assert run.tokens == ANSWER[:limit]
    assert run.finish_reason == "length"
    assert run.text == Letters().decode(ANSWER[:limit])
    run.check_what_is_left()


@modes
@pytest.mark.parametrize("by_string", [False, True])
@pytest.mark.parametrize(("stop_at", "limit"), [(3, 5), (3, 4), (0, 1), (5, 6)])
def test_a_stop_within_the_limit_wins(mode, by_string, stop_at, limit):
    stops = {"stop_strings": [Letters().decode([ANSWER[stop_at]])]}
    if not by_string:
        stops = {"stop_ids": [ANSWER[stop_at]]}
    run = Run(mode, max_tokens=limit, **stops)
    assert run.tokens == ANSWER[: stop_at + 1]
    assert run.finish_reason == "stop"


@modes
@pytest.mark.parametrize("by_string", [False, True])
@pytest.mark.parametrize(("stop_at", "limit"), [(5, 3), (4, 4), (1, 1), (6, 6)])
def test_a_stop_beyond_the_limit_is_a_matter_of_length(mode, by_string, stop_at, limit):
    stops = {"stop_strings": [Letters().decode([ANSWER[stop_at]])]}
    if not by_string:
        stops = {"stop_ids": [ANSWER[stop_at]]}
    run = Run(mode, max_tokens=limit, **stops)
    assert run.tokens == ANSWER[:limit]
    assert run.finish_reason == "length"
    assert run.text == Letters().decode(ANSWER[:limit])


@modes
def test_the_beginning_of_a_stop_string_is_given_out_when_the_limit_ends_the_text(mode):
    run = Run(mode, max_tokens=4, stop_strings=["hij"])
    assert (run.text, run.finish_reason) == ("fghi", "length")


@modes
def test_the_beginning_of_a_stop_string_is_given_out_when_an_end_token_follows(mode):
    run = Run(mode, stop_ids=[ANSWER[3]], stop_strings=["ghij"])
    assert (run.text, run.finish_reason) == ("fgh", "stop")


@modes
@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_going_on_from_the_cache_after_a_stop_equals_a_cold_run(mode, at):
    run = Run(mode, stop_ids=[ANSWER[at]])
    pair = Pair(run.target, run.drafter)
    warm = list(generate(pair, PROMPT + run.tokens, max_tokens=5, cache=run.cache))
    cold = list(generate(Pair(run.target), PROMPT + run.tokens, max_tokens=5))
    assert [t for r in warm for t in r.tokens] == [t for r in cold for t in r.tokens]
    assert mx.array_equal(
        run.target.verify(mx.array([1]), run.cache).logits,
        run.target.prefill([*PROMPT, *ANSWER[: at + 5], 1], run.target.make_cache()).logits,
    )


def test_the_context_of_the_target_ends_the_text():
    target = CountingTarget()
    target.context_length = 7
    rounds = list(generate(Pair(target, scripted()), PROMPT, max_tokens=100))
    assert [t for r in rounds for t in r.tokens] == ANSWER[:5]
    assert rounds[-1].finish_reason == "length"


def test_a_stop_inside_a_block_marks_the_round_as_truncated():
    run = Run("perfect", stop_ids=[ANSWER[3]])
    assert [(r.kind, r.n_drafted, r.n_accepted, r.truncated) for r in run.rounds] == [
        ("prefill", 0, 0, False),
        ("verify", BLOCK, BLOCK, True),
    ]


def test_a_stop_on_the_bonus_token_truncates_nothing():
    run = Run("perfect", stop_ids=[ANSWER[BLOCK + 1]])
    assert [r.truncated for r in run.rounds] == [False, False]


def test_the_tokenizer_says_which_tokens_end_a_text_unless_the_caller_does():
    letters = Letters()
    letters.stop_ids = frozenset([ANSWER[2], ANSWER[4]])
    pair = Pair(CountingTarget(), tokenizer=letters)

    def n_tokens(stop_ids: Sequence[int] | None) -> int:
        return sum(len(r.tokens) for r in generate(pair, PROMPT, max_tokens=9, stop_ids=stop_ids))

    assert [n_tokens(None), n_tokens([ANSWER[4]]), n_tokens([])] == [3, 5, 9]


@modes
def test_the_rows_of_logits_belong_to_the_tokens(mode):
    run = Run(mode, with_logits=True, stop_ids=[ANSWER[9]])
    for round_ in run.rounds:
        assert round_.logits.shape == (len(round_.tokens), VOCAB)
        assert mx.argmax(round_.logits, axis=-1).tolist() == list(round_.tokens)
    assert all(r.logits is None for r in Run(mode).rounds)


class HalfCharacters(Letters):
    """Every token is the first byte of a character."""

    def decode(self, tokens: Sequence[int]) -> str:
        return (b"\xc3" * len(tokens)).decode(errors="replace")


def test_a_stop_string_that_the_limit_completes_is_a_stop():
    pair = Pair(CountingTarget(), tokenizer=HalfCharacters())
    stop = "\N{REPLACEMENT CHARACTER}" * 3
    rounds = list(generate(pair, PROMPT, max_tokens=3, stop_strings=[stop]))
    assert ("".join(r.text for r in rounds), rounds[-1].finish_reason) == ("", "stop")
