import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, Sampling, generate
from spec_core.guide import TokenBias
from spec_core.testing import ToyDrafter, ToyTarget


def ids(target, drafter=None, cap=0, **settings):
    rounds = generate(
        Pair(target, drafter), [1, 2, 3], max_tokens=40, cap=FixedCap(cap), **settings
    )
    return [t for r in rounds for t in r.tokens]


class OnlyAfter:
    """Allows after token t only the tokens (t + 1) and (t + 2) mod V: a walk on the drafts."""

    fixed = False

    def __init__(self, last, vocab_size=12):
        self.last, self.vocab_size = last, vocab_size

    def bias(self, drafts):
        rows = []
        for token in [self.last, *drafts]:
            row = [-float("inf")] * self.vocab_size
            for step in (1, 2):
                row[(token + step) % self.vocab_size] = 0.0
            rows.append(row)
        return mx.array(rows)

    def advance(self, tokens):
        self.last = tokens[-1]


def test_a_bias_moves_the_choice_in_every_mode():
    target = ToyTarget()
    plain = ids(target)
    banned = plain[3]
    biased = ids(target, guide=TokenBias({banned: -100.0}, 12))
    assert banned in plain and banned not in biased
    for cap in (1, 3):
        guide = TokenBias({banned: -100.0}, 12)
        assert ids(target, ToyDrafter(), cap, guide=guide) == biased
    assert set(ids(target, guide=TokenBias({5: 100.0}, 12))) == {5}
    assert ids(target, guide=TokenBias({}, 12)) == plain


def test_a_guide_that_follows_the_tokens_is_lossless_under_speculation():
    target = ToyTarget()
    plain = ids(target, guide=OnlyAfter(3))
    assert all((b - a) % 12 in (1, 2) for a, b in zip([3, *plain], plain, strict=False))
    for cap in (1, 2, 4):
        assert ids(target, ToyDrafter(), cap, guide=OnlyAfter(3)) == plain
    hot = ids(
        target, ToyDrafter(), 4, guide=OnlyAfter(3), sampling=Sampling(temperature=3.0, seed=2)
    )
    assert all((b - a) % 12 in (1, 2) for a, b in zip([3, *hot], hot, strict=False))


def test_bias_ids_must_be_in_the_vocabulary():
    for wrong in (-1, 12):
        with pytest.raises(ValueError, match=rf"0\.\.11, got {wrong}"):
            TokenBias({wrong: 1.0}, 12)


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
def test_a_bias_without_end_is_refused(bias):
    with pytest.raises(ValueError, match=rf"\[bias\] Biases must be numbers or -inf, got {bias}\."):
        TokenBias({3: bias}, 12)
