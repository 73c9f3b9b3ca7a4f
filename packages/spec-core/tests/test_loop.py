"""What generate() accepts and refuses, prompts and prefill, seeds."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from spec_core import FixedCap, Pair, Sampling, SpecError, generate
from spec_core import loop as loop_module
from spec_core.batch import Batch
from spec_core.testing import ScriptedDrafter, ToyCache, ToyDrafter, ToyTarget
from spec_core.types import TargetOutput

PROMPT = [1, 5, 2]


class Digits:
    """Token t is the t-th letter; the first letter ends a text."""

    stop_ids = frozenset([0])

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def tokens(
    target=None, drafter=None, prompt: Sequence[int] | str = PROMPT, **arguments
) -> list[int]:
    tokenizer = arguments.pop("tokenizer", None)
    pair = Pair(target or ToyTarget(), drafter, tokenizer)
    return [t for r in generate(pair, prompt, **{"max_tokens": 12, **arguments}) for t in r.tokens]


def message(error: type[Exception], *arguments: object, **options: object) -> str:
    with pytest.raises(error) as raised:
        generate(*arguments, **options)  # before the first round is asked for
    return str(raised.value)


def test_an_empty_prompt_is_refused():
    want = "[generate] The prompt must hold at least one token, got none."
    assert message(SpecError, Pair(ToyTarget()), []) == want
    assert message(SpecError, Pair(ToyTarget(), tokenizer=Digits()), "") == want


@pytest.mark.parametrize("wrong", [-1, 12, 99])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    assert message(SpecError, Pair(ToyTarget()), [1, wrong, 2]) == (
        f"[generate] Prompt ids must be in 0..11, got {wrong}. "
        "Encode the prompt with the target's own tokenizer."
    )


@pytest.mark.parametrize("n", [7, 8])
def test_a_prompt_that_fills_the_context_is_refused(n):
    assert message(SpecError, Pair(ToyTarget(context_length=7)), [1] * n) == (
        f"[generate] The prompt must be shorter than the model's context of 7 tokens, got {n}. "
        "Shorten it."
    )


def test_a_prompt_that_leaves_room_for_one_token_gives_one():
    assert len(tokens(ToyTarget(context_length=7), ToyDrafter(), [1] * 6)) == 1


@pytest.mark.parametrize("prompt", [[1.7, 2], ["1"], [[1]], [None]])
def test_ids_that_are_no_whole_numbers_are_refused(prompt):
    with pytest.raises(TypeError, match=r"\[generate\] Prompt ids must be whole numbers, but '"):
        tokens(prompt=prompt)


def test_whole_numbers_of_any_kind_are_ids():
    assert tokens(prompt=mx.array([1, 5, 2])) == tokens(prompt=(1, 5, np.int64(2)))


def test_text_needs_a_tokenizer():
    want = "[generate] A text prompt needs a tokenizer. Pass ids instead."
    assert message(SpecError, Pair(ToyTarget()), "abc") == want


def test_stop_strings_need_a_tokenizer():
    want = "[generate] Stop strings need a tokenizer. Use stop_ids instead."
    assert message(SpecError, Pair(ToyTarget()), PROMPT, stop_strings=["x"]) == want


def test_an_empty_stop_string_is_refused():
    want = "[stop] A stop string must have at least one character, got ''."
    pair = Pair(ToyTarget(), tokenizer=Digits())
    assert message(ValueError, pair, PROMPT, stop_strings=["x", ""]) == want


@pytest.mark.parametrize("n", [0, -1])
def test_a_limit_below_one_token_is_refused(n):
    want = f"[generate] max_tokens must be >= 1, got {n}."
    assert message(ValueError, Pair(ToyTarget()), PROMPT, max_tokens=n) == want


def test_a_chunk_below_one_id_is_refused():
    want = "[generate] prefill_chunk must be >= 1, got 0."
    assert message(ValueError, Pair(ToyTarget()), PROMPT, prefill_chunk=0) == want


def test_a_cache_that_holds_the_whole_prompt_is_refused():
    target = ToyTarget()
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    with pytest.raises(SpecError) as error:
        tokens(target, cache=cache)
    assert str(error.value) == (
        "[generate] At least one prompt id must be left to forward, got a cache of 3 for 3. "
        "Roll the cache back by one."
    )


def test_text_is_encoded_as_it_stands():
    target = ToyTarget()
    assert tokens(target, prompt="bfc", tokenizer=Digits()) == tokens(target, stop_ids=[0])


class Words:
    """Words with a space before them, which goes at the start of a text; the last id is special."""

    stop_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens if token != 11).removeprefix(" ")


@pytest.mark.parametrize("prompt", ["1 5 2", "1 5 2 11", "1 5 11 11 11"])
def test_the_text_of_an_answer_goes_on_where_the_prompt_ends(prompt):
    pair = Pair(ToyTarget(), tokenizer=Words())
    rounds = list(generate(pair, prompt, max_tokens=6))
    ids, words = [t for r in rounds for t in r.tokens], Words()
    whole = words.decode([*words.encode(prompt), *ids])
    assert words.decode(words.encode(prompt)) + "".join(r.text for r in rounds) == whole


def test_one_stop_string_may_be_given_bare():
    pair = Pair(ToyTarget(), tokenizer=Digits())
    answer = Digits().decode(tokens(stop_ids=[]))
    arguments = {"stop_ids": [], "max_tokens": 12}
    rounds = generate(pair, PROMPT, stop_strings=answer[4:6], **arguments)
    assert "".join(r.text for r in rounds) == answer[: answer.index(answer[4:6])]


class Chunks(ToyTarget):
    """Notes the prompt chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[list[int]] = []

    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        self.chunks.append(list(tokens))
        return super().prefill(tokens, cache, taps=taps)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 512])
def test_chunks_end_at_multiples_and_change_nothing(size):
    prompt, target, done = [1, 5, 2, 3, 3, 1, 0], Chunks(), []
    drafter = ToyDrafter()
    arguments = {"on_prefill": lambda *counts: done.append(counts), "prefill_chunk": size}
    assert tokens(target, drafter, prompt, **arguments) == tokens(prompt=prompt)
    assert target.chunks == [prompt[at : at + size] for at in range(0, 7, size)]
    assert done == [(min(at + size, 7), 7) for at in range(0, 7, size)]
    assert drafter.observed[:7] == prompt


def test_chunks_after_a_cached_beginning_end_at_the_same_places():
    prompt, target = [1, 5, 2, 3, 3, 1, 0], Chunks()
    cache = target.make_cache()
    target.prefill(prompt[:4], cache)
    target.chunks.clear()
    assert tokens(target, None, prompt, cache=cache, prefill_chunk=3) == tokens(prompt=prompt)
    assert target.chunks == [[3, 1], [0]]


def test_a_drafter_is_reset_for_a_new_sequence_and_kept_for_a_cache():
    target, drafter = ToyTarget(), ToyDrafter()
    answer = tokens(target, drafter)
    assert drafter.observed == PROMPT + answer[:-1]
    tokens(target, drafter)
    assert drafter.observed == PROMPT + answer[:-1]
    cache = target.make_cache()
    drafter.reset()
    answer = tokens(target, drafter, cache=cache)
    more = tokens(target, drafter, PROMPT + answer, cache=cache)
    assert drafter.observed == PROMPT + answer + more[:-1]


def test_a_drafter_is_reset_when_its_text_begins_not_when_it_is_asked_for():
    target, drafter = ToyTarget(), ToyDrafter()
    asked = [generate(Pair(target, drafter), prompt, max_tokens=9) for prompt in (PROMPT, [4, 5])]
    first, second = ([t for r in rounds for t in r.tokens] for rounds in asked)
    assert len(first) == 9 and drafter.observed == [4, 5, *second[:-1]]


DRAFTERS = {
    "plain": lambda: None,
    "full q": lambda: ToyDrafter(),
    "one-hot": lambda: ScriptedDrafter([4, 7] * 20, 3, 12, 4),
}


@pytest.mark.parametrize("mode", DRAFTERS)
def test_a_seed_repeats_and_two_seeds_differ(mode):
    def run(seed: int | None) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.5, seed=seed)
        return tuple(tokens(drafter=DRAFTERS[mode](), sampling=sampling, max_tokens=20))

    for seed in (0, 1, 2**63, 2**64 - 1):
        assert run(seed) == run(seed)
    assert len({run(seed) for seed in range(8)}) == 8


@pytest.mark.parametrize("mode", DRAFTERS)
def test_without_a_seed_answers_differ(mode):
    sampling = Sampling(temperature=1.5)
    arguments = {"sampling": sampling, "max_tokens": 20}
    assert len({tuple(tokens(drafter=DRAFTERS[mode](), **arguments)) for _ in "abcd"}) == 4


@pytest.mark.parametrize("mode", DRAFTERS)
def test_a_seed_holds_whatever_other_code_draws(mode):
    def run() -> list[int]:
        sampling = Sampling(temperature=1.5, seed=7)
        return tokens(drafter=DRAFTERS[mode](), sampling=sampling, max_tokens=20)

    mx.random.seed(1)
    first = run()
    mx.random.seed(2)
    mx.eval(mx.random.normal((3,)))
    assert run() == first


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-9},
        {"temperature": 1.3, "top_k": 1},
        {"temperature": 0.01, "top_k": 1, "top_p": 0.8},
        {"temperature": 1e-3, "top_k": 2, "top_p": 0.1},
        {"temperature": 2.0, "top_p": 1e-9},
    ],
)
@pytest.mark.parametrize("mode", DRAFTERS)
def test_settings_that_leave_one_token_equal_greedy(settings, mode):
    greedy = tokens(max_tokens=30)
    sampling = Sampling(**settings)
    assert tokens(drafter=DRAFTERS[mode](), max_tokens=30, sampling=sampling) == greedy


@pytest.mark.parametrize("cap", [0, 4])
def test_penalties_change_a_greedy_text_the_same_way_in_every_mode(cap):
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    plain = tokens(max_tokens=40, sampling=sampling)
    assert plain != tokens(max_tokens=40)
    for drafter in (ToyDrafter(), ScriptedDrafter(plain, 3, 12, 4, wrong_at=[3])):
        assert tokens(drafter=drafter, max_tokens=40, sampling=sampling, cap=FixedCap(cap)) == plain


def test_greedy_penalties_are_those_worked_out_in_numpy(reference):
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    target, want = ToyTarget(), []
    for _ in range(40):
        last = (PROMPT + want)[-2:]
        row = [float(x) for x in target.table[last[0], last[1]].tolist()]
        sharp = Sampling(0.01, 0, 1.0, 0.0, 1.3, 0.5, 0.2)
        want.append(int(reference(row, sharp, PROMPT, want).argmax()))
    assert tokens(target, ToyDrafter(), max_tokens=40, sampling=sampling) == want


def test_near_ties_reach_the_round():
    target = ToyTarget()
    target.table = mx.zeros_like(target.table)
    rounds = list(generate(Pair(target, ScriptedDrafter([0] * 9, 3, 12, 4)), PROMPT, max_tokens=6))
    assert [(len(r.tokens), r.near_ties) for r in rounds] == [(1, 1), (5, 5)]


class Half(ToyTarget):
    """Answers in bfloat16, the best two logits 3 units in the last place apart."""

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        row = mx.array([128.0, 128.0 * (1 - 3 * 2**-7), *[0.0] * 10])
        logits = mx.broadcast_to(row, output.logits.shape).astype(mx.bfloat16)
        return TargetOutput(logits, output.taps)


@pytest.mark.parametrize("settings", [{}, {"frequency_penalty": 1e-6}])
def test_penalties_do_not_hide_the_near_ties_of_half_precision(settings):
    rounds = generate(Pair(Half()), PROMPT, max_tokens=4, sampling=Sampling(**settings))
    assert sum(r.near_ties for r in rounds) == 4


def test_rounds_carry_wall_time_and_their_source():
    rounds = list(generate(Pair(ToyTarget(), ToyDrafter()), PROMPT, max_tokens=9))
    assert all(r.elapsed_s > 0 for r in rounds)
    assert rounds[0].source == "target"
    assert {r.source for r in rounds if r.n_drafted} == {"toy"}
    assert all(r.text == "" for r in rounds)


class Clock:
    """Stands still but for what a test adds."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(ToyTarget):
    """A second for each chunk of a prompt, two for each verify."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def prefill(self, tokens, cache, *, taps=()):
        self.clock.now += 1 - 2
        return super().prefill(tokens, cache, taps=taps)  # which is a verify here

    def verify(self, block, cache, *, taps=()):
        self.clock.now += 2
        return super().verify(block, cache, taps=taps)


@pytest.fixture(name="clock")
def _clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop_module, "time", clock)
    return clock


def test_the_time_of_a_round_is_the_loops_own(clock):
    asked = generate(
        Pair(Timed(clock), ToyDrafter(max_draft=2)), PROMPT * 3, max_tokens=9, prefill_chunk=3
    )
    clock.now += 100
    rounds = []
    for round_ in asked:
        rounds.append(round_)
        clock.now += 50
    assert [r.elapsed_s for r in rounds] == [3, *[2] * (len(rounds) - 1)]


def test_a_step_enqueued_ahead_counts_from_the_round_before_it(clock):
    rounds = []
    for round_ in generate(Pair(Timed(clock)), PROMPT, max_tokens=6):
        rounds.append(round_)
        clock.now += 50
    # The first plain step and the one behind it are enqueued before the first one is read.
    assert [r.elapsed_s for r in rounds] == [1, 4, 52, 52, 52, 50]


def test_the_time_of_a_prompt_in_a_batch_leaves_the_other_rows_out(clock):
    batch = Batch(Timed(clock))
    batch.add(Pair(Timed(clock)), PROMPT * 3, max_tokens=2, prefill_chunk=3)
    clock.now += 100
    first = []
    while not first:
        first = batch.step()
        clock.now += 50
    assert first[0][1].elapsed_s == 3


class _NarrowTarget(ToyTarget):
    """Verifies four rows at once and no more, as exact kernels serve so many and no more."""

    max_block = 4

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        assert block.shape[0] <= self.max_block
        return super().verify(block, cache, taps=taps)


@pytest.mark.parametrize("cap", [None, FixedCap(6)])
def test_a_draft_is_no_longer_than_the_target_verifies_at_once(cap):
    pair = Pair(_NarrowTarget(), ToyDrafter(max_draft=6))
    assert (pair.max_draft, Pair(_NarrowTarget()).max_draft) == (3, 0)
    assert Pair(ToyTarget(), ToyDrafter(max_draft=6)).max_draft == 6
    rounds = list(generate(pair, [1, 2, 3], max_tokens=30, cap=cap))
    assert max(round_.n_drafted for round_ in rounds) == 3
    plain = generate(Pair(ToyTarget()), [1, 2, 3], max_tokens=30)
    assert [t for r in rounds for t in r.tokens] == [t for r in plain for t in r.tokens]


@pytest.mark.parametrize("drafter", [None, ToyDrafter(max_draft=6)])
def test_buffers_that_a_growing_cache_leaves_are_given_back(drafter, monkeypatch):
    """Whatever a round's length: one of several tokens steps over a boundary, ollama#18510."""
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(0))
    list(generate(Pair(ToyTarget(), drafter), PROMPT, max_tokens=800))
    assert len(cleared) == 3
    batch = Batch(ToyTarget())
    for prompt in ([1, 2], [3, 4]):
        batch.add(Pair(ToyTarget()), prompt, max_tokens=300)
    while any(outcome.finish_reason is None for _, outcome in batch.step()) or batch.rows:
        for row in batch.rows:
            if row.run.n_left == 0:
                batch.remove(row)
    assert len(cleared) == 5
