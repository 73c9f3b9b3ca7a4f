"""The distribution of the first tokens of many short generations, end to end, in every mode.

test_distribution draws 40,000 times for every mode and setting without the loop. Here the loop's
own state is at stake: keys, penalties, what is committed. Each round waits for the device, hence
fewer runs.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Draft, Pair, Sampling, generate
from spec_core.testing import ToyDrafter, ToyTarget

VOCAB, PROMPT, N_TOKENS = 4, (1, 2), 5
N_RUNS = {"plain": 1_500, "full q": 4_200, "one-hot": 1_500}  # 5 tokens each
# What depends on the loop's own state; the other settings are functions of a row alone.
SETTINGS = Sampling(
    temperature=1.4, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.5
)


class Copier(ToyDrafter):
    """Always proposes the same continuation: q is one-hot."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        return Draft(mx.array([(anchor + 2 * i) % VOCAB for i in range(cap)], mx.int32))


class Overflowing(ToyDrafter):
    """Draws from numbers of its own and reports rows of NaN."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        draft = super().draft(anchor, cap, sampling=sampling, key=key)
        return Draft(draft.tokens, mx.full((cap, VOCAB), mx.nan))


DRAFTERS = {
    "plain": None,
    "full q": ToyDrafter(VOCAB, max_draft=3),
    "one-hot": Copier(VOCAB, max_draft=3),
}


def joint(target: ToyTarget, settings: Sampling, reference) -> np.ndarray:
    table = np.array(target.table, dtype=np.float64)
    probs = np.ones((VOCAB,) * N_TOKENS)
    for answer in itertools.product(range(VOCAB), repeat=N_TOKENS):
        before = [*PROMPT, *answer]
        for at, token in enumerate(answer):
            row = table[before[at], before[at + 1]]
            probs[answer] *= reference(row, settings, PROMPT, answer[:at])[token]
    return probs


def observed(target: ToyTarget, drafter, settings: Sampling, n_runs: int) -> np.ndarray:
    counts = np.zeros((VOCAB,) * N_TOKENS)
    pair = Pair(target, drafter)
    for seed in range(n_runs):
        fields = {name: getattr(settings, name) for name in settings.__slots__} | {"seed": seed}
        rounds = generate(pair, PROMPT, max_tokens=N_TOKENS, sampling=Sampling(**fields))
        counts[tuple(token for r in rounds for token in r.tokens)] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("mode", DRAFTERS)
def test_the_first_tokens_follow_the_target(mode, reference, p_value, alpha):
    target = ToyTarget(VOCAB, scale=1.0)
    counts = observed(target, DRAFTERS[mode], SETTINGS, N_RUNS[mode])
    probs = joint(target, SETTINGS, reference)
    assert p_value(counts.sum(axis=(3, 4)), probs.sum(axis=(3, 4))) > alpha, "tokens 1 to 3"
    assert p_value(counts.sum(axis=(0, 1)), probs.sum(axis=(0, 1))) > alpha, "tokens 3 to 5"


def test_the_test_above_tells_other_settings_apart(reference, p_value, alpha):
    target = ToyTarget(VOCAB, scale=1.0)
    counts = observed(target, DRAFTERS["full q"], Sampling(temperature=1.4), 700)
    probs = joint(target, SETTINGS, reference)
    assert p_value(counts.sum(axis=(0, 1)), probs.sum(axis=(0, 1))) < alpha


def test_a_drafter_that_overflows_costs_speed_and_nothing_else(reference, p_value, alpha):
    target, settings = ToyTarget(VOCAB, scale=1.0), Sampling(temperature=1.0)
    counts = observed(target, Overflowing(VOCAB, max_draft=3), settings, 600)
    probs = joint(target, settings, reference)
    assert p_value(counts.sum(axis=(3, 4)), probs.sum(axis=(3, 4))) > alpha
