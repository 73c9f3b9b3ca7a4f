"""The accept rule keeps the target's distribution, whoever drafts; a wrong rule does not.

One round on an order-2 Markov target is vectorised over 60,000 keys: penalties by row, target
distribution, K drafts, accept rule. When the round emits fewer than three tokens, plain draws add
the rest, so that each key gives one sample of the joint distribution of three tokens; NumPy
enumerates the same distribution.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Acceptance, Sampling, accept_residual, residual, target_probs
from spec_core.sampling import Seen, count_tokens, draw, penalise, seen_by_row

N_DRAWS = 60_000
PROMPT = (1, 2)
AcceptRule = Callable[[mx.array, mx.array, mx.array | None, mx.array], Acceptance]

SETTINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "temperature 0.6": Sampling(temperature=0.6),
    "temperature 1.7": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.15),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.6),
    "presence": Sampling(temperature=1.0, presence_penalty=1.2),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.8),
    "negative penalties": Sampling(temperature=1.0, presence_penalty=-0.7, frequency_penalty=-0.4),
    "all": Sampling(
        temperature=1.4,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
}
MODES = ("full q", "one-hot", "plain")


class Rig:
    """A random target and drafter over a small vocabulary, and one round of either."""

    def __init__(self, vocab: int, settings: Sampling, mode: str, accept: AcceptRule) -> None:
        keys = mx.random.split(mx.random.key(vocab), 3)
        self.vocab, self.settings, self.mode, self.accept = vocab, settings, mode, accept
        self.table = 1.5 * mx.random.normal((vocab, vocab, vocab), key=keys[0])
        self.draft_table = mx.random.normal((vocab, vocab), key=keys[1])
        self.copy_of = mx.argmax(self.table.sum(axis=0), axis=-1).astype(mx.int32)
        self.prompt = count_tokens(mx.array(PROMPT, mx.int32), vocab)

    def rows(self, history: list[mx.array], drafts: mx.array) -> mx.array:
        """p after the history and after each draft: (K + 1, V)."""
        before = mx.concatenate([mx.array(PROMPT, mx.int32), *(t[None] for t in history), drafts])
        n_rows = drafts.shape[0] + 1
        ends = before[-n_rows - 1 :]
        logits = self.table[ends[:-1], ends[1:]]
        answer = mx.zeros((self.vocab,))
        for token in history:
            answer = answer + (mx.arange(self.vocab) == token)
        seen = seen_by_row(Seen(self.prompt, answer), drafts)
        return target_probs(penalise(logits, self.settings, seen), self.settings)

    def drafts(self, key: mx.array, n: int) -> tuple[mx.array, mx.array | None]:
        last, tokens, rows = mx.array(PROMPT[-1], mx.int32), [], []
        for step in range(n):
            if self.mode == "one-hot":
                last = self.copy_of[last]
            else:
                rows.append(mx.softmax(self.draft_table[last]))
                last = draw(rows[-1], mx.random.split(key, n)[step])
            tokens.append(last)
        return mx.stack(tokens), mx.stack(rows) if rows else None

    def sample(self, key: mx.array) -> mx.array:
        """Three tokens: those of one round, then plain draws."""
        keys = mx.random.split(key, 5)
        none = mx.zeros((0,), mx.int32)
        if self.mode == "plain":
            emitted: list[mx.array] = []
            n = mx.array(0, mx.int32)
        else:
            drafts, q = self.drafts(keys[0], 2)
            outcome = self.accept(self.rows([], drafts), drafts, q, keys[1])
            padded = mx.concatenate([drafts, outcome.next_token[None]])
            n = outcome.n_accepted + 1
            place = mx.arange(3)
            emitted = list(mx.where(place < n - 1, padded, outcome.next_token))
        tokens: list[mx.array] = []
        for at in range(3):
            fresh = self.accept(self.rows(tokens, none), none, None, keys[2 + at]).next_token
            tokens.append(mx.where(n > at, emitted[at], fresh) if emitted else fresh)
        return (tokens[0] * self.vocab + tokens[1]) * self.vocab + tokens[2]

    def counts(self) -> np.ndarray:
        keys = mx.random.split(mx.random.key(1234), N_DRAWS)
        drawn = np.array(mx.vmap(self.sample)(keys))
        return np.bincount(drawn, minlength=self.vocab**3)

    def expected(self, reference: Callable[..., np.ndarray]) -> np.ndarray:
        table, vocab = np.array(self.table, dtype=np.float64), self.vocab
        joint = np.zeros((vocab, vocab, vocab))
        first = reference(table[PROMPT], self.settings, PROMPT, ())
        for a in np.flatnonzero(first):
            second = reference(table[PROMPT[1], a], self.settings, PROMPT, (a,))
            for b in np.flatnonzero(second):
                third = reference(table[a, b], self.settings, PROMPT, (a, b))
                joint[a, b] = first[a] * second[b] * third
        return joint


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_follow_the_target(name, mode, reference, p_value, alpha):
    for vocab in (4, 12):
        rig = Rig(vocab, SETTINGS[name], mode, accept_residual)
        assert p_value(rig.counts(), rig.expected(reference)) > alpha, f"vocabulary of {vocab}"


@pytest.mark.parametrize("mode", MODES)
def test_three_tokens_of_a_vocabulary_of_50_follow_the_target(mode, reference, p_value, alpha):
    rig = Rig(50, SETTINGS["top-k"], mode, accept_residual)
    assert p_value(rig.counts(), rig.expected(reference)) > alpha


def rule(
    accepts: Callable[[mx.array, mx.array, mx.array], mx.array],
    left_over: Callable[[mx.array, mx.array], mx.array] = residual,
) -> AcceptRule:
    """An accept rule of the right shape from its two parts: the test and the residual."""

    def accept(
        p: mx.array, drafts: mx.array, draft_probs: mx.array | None, key: mx.array
    ) -> Acceptance:
        n, vocab = drafts.shape[0], p.shape[-1]
        accept_key, draw_key = mx.random.split(key)
        one_hot = (drafts[:, None] == mx.arange(vocab)).astype(mx.float32)
        q = one_hot if draft_probs is None else draft_probs
        u = mx.random.uniform(shape=(n,), key=accept_key)
        kept = accepts(u, (p[:n] * one_hot).sum(axis=-1), (q * one_hot).sum(axis=-1))
        n_accepted = mx.cumprod(kept.astype(mx.int32)).sum().astype(mx.int32)
        q_row = mx.concatenate([q, mx.zeros((1, vocab))])[n_accepted]
        next_token = draw(left_over(p[n_accepted], q_row), draw_key)
        return Acceptance(n_accepted, next_token, mx.array(0, mx.int32))

    return accept


def flipped(p: mx.array, q: mx.array) -> mx.array:
    """norm(max(0, q - p)), and p where there was no draft."""
    positive = mx.maximum(q - p, 0.0)
    return mx.where(positive.sum() > 0, positive / positive.sum(), p)


MUTANTS = {
    "keeps every draft": rule(lambda u, p, q: u < 2),
    "keeps a draft when p >= q, without the draw": rule(lambda u, p, q: p >= q),
    "keeps with probability p instead of p / q": rule(lambda u, p, q: u < p),
    "keeps with probability min(1, q / p)": rule(lambda u, p, q: u * p < q),
    "keeps a quarter too often": rule(lambda u, p, q: u * q < 1.25 * p),
    "draws the replacement from p": rule(lambda u, p, q: u * q < p, lambda p, q: p),
    "draws the replacement from q - p": rule(lambda u, p, q: u * q < p, flipped),
}
# With q = 1 at the draft, p is p / q: there this one is the right rule.
SAME_FOR_ONE_HOT = "keeps with probability p instead of p / q"
MUTANT_RUNS = [(name, "full q") for name in MUTANTS]
MUTANT_RUNS += [(name, "one-hot") for name in MUTANTS if name != SAME_FOR_ONE_HOT]


def test_the_rule_of_the_mutants_is_right_when_its_parts_are(reference, p_value, alpha):
    right = rule(lambda u, p, q: u * q < p)
    for mode in ("full q", "one-hot"):
        rig = Rig(4, SETTINGS["temperature 1"], mode, right)
        assert p_value(rig.counts(), rig.expected(reference)) > alpha


@pytest.mark.parametrize(("name", "mode"), MUTANT_RUNS)
def test_a_mutated_accept_rule_is_found_out(name, mode, reference, p_value, alpha):
    rig = Rig(4, SETTINGS["temperature 1"], mode, MUTANTS[name])
    assert p_value(rig.counts(), rig.expected(reference)) < alpha


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_penalties_that_overlook_the_drafts_of_the_block_are_found_out(
    name, reference, p_value, alpha, monkeypatch
):
    rig = Rig(4, SETTINGS[name], "full q", accept_residual)
    monkeypatch.setitem(globals(), "seen_by_row", lambda seen, drafts: seen)
    assert p_value(rig.counts(), rig.expected(reference)) < alpha
