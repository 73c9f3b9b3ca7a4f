"""Random drafts, caps, stops, closings and resumes: the ids stay those of mlx-lm's own loop."""

import random
from collections.abc import Sequence
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from spec_core import Draft, Pair, Sampling, TargetOutput, generate
from spec_drafters import HybridDrafter, LookupDrafter
from spec_targets import MlxTarget
from spec_targets.load import family_for
from spec_targets.tiny import tiny_model

FAMILIES = ("llama", "gemma3_text", "qwen3_5")  # trim, window, recurrent state


class Guesser:
    """Knows the answer, and is wrong now and then; some of its ids are outside the vocabulary."""

    name = "guesser"
    max_draft = 7

    def __init__(
        self, answer: Sequence[int], n_prompt: int, vocab_size: int, rng: random.Random
    ) -> None:
        self.answer, self.n_prompt, self.vocab_size, self.rng = answer, n_prompt, vocab_size, rng
        self.taps = (1,)
        self.observed: list[int] = []

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        at = len(self.observed) - self.n_prompt + 1
        right = self.answer[at : at + self.rng.randint(0, min(cap, self.max_draft))]
        tokens = [
            token if self.rng.random() < 0.7 else self.rng.randrange(self.vocab_size + 2)
            for token in right
        ]
        return Draft(mx.array(tokens, mx.int32), source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        assert [tap.shape[0] for tap in output.taps] == [len(tokens)]
        self.observed += tokens

    def reset(self) -> None:
        self.observed = []

    def state(self) -> list[int]:
        return list(self.observed)

    def restore(self, state: list[int]) -> None:
        self.observed = list(state)


class AnyCap:
    """Another cap every round, plain steps included."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def next(self) -> int:
        return self.rng.choice((0, 0, 1, 2, 3, 5, 8))

    def observe(self, round_) -> None:
        pass


@pytest.fixture(scope="module")
def models():
    """Per family: the model for mlx-lm, and a target around another instance of it."""
    return {
        name: (tiny_model(name), MlxTarget(tiny_model(name), family_for(name), name))
        for name in FAMILIES
    }


def next_logits(target: MlxTarget, cache, token: int) -> mx.array:
    logits = target.verify(mx.array([token]), cache).logits
    target.commit(cache, 0)
    return logits


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_generation_goes_on_with_the_same_ids(models, family, seed):
    model, target = models[family]
    rng = random.Random(seed)
    prompt = [rng.randrange(target.vocab_size) for _ in range(rng.choice((1, 3, 17, 40)))]
    n_tokens = rng.choice((2, 5, 30, 45))
    steps = generate_step(mx.array(prompt), model, max_tokens=n_tokens)
    want = [int(token) for token, _ in islice(steps, n_tokens)]
    stop_ids = [rng.choice(want)] if rng.random() < 0.4 else []
    expected = want[: want.index(stop_ids[0]) + 1] if stop_ids else want

    guesser = Guesser(want, len(prompt), target.vocab_size, rng)
    drafter = HybridDrafter(guesser, LookupDrafter(min_match=1)) if seed % 3 == 0 else guesser
    cache, context, reason = target.make_cache(), list(prompt), None
    while reason is None:
        rounds = generate(
            Pair(target, drafter),
            context,
            max_tokens=len(prompt) + n_tokens - len(context),
            cap=AnyCap(rng),
            stop_ids=stop_ids,
            cache=cache,
            prefill_chunk=rng.choice((1, 2, 7, 512)),
        )
        for round_ in islice(rounds, rng.choice((1, 2, 3, 1000))):
            context += round_.tokens
            reason = round_.finish_reason
        rounds.close()
        assert not cache.is_open and cache.offset == len(context) - 1
        assert guesser.observed == context[:-1]

    assert context[len(prompt) :] == expected
    assert reason == ("stop" if stop_ids else "length")
    fresh = target.make_cache()
    target.prefill(context[:-1], fresh)
    assert mx.array_equal(
        next_logits(target, cache, context[-1]), next_logits(target, fresh, context[-1])
    )
