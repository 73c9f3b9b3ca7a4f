"""Enqueueing ahead is used where it is faster, and given up where it is not."""

import random

import pytest

from spec_core.ahead import Ahead


def play(ahead, cost, n, width=4, seed=0):
    """Rounds with a cost by way; returns the share that was enqueued ahead, and the seconds."""
    rng, last, total, n_ahead = random.Random(seed), None, 0.0, 0
    for i in range(n):
        way = ahead.pays(width)
        seconds = cost(way, i) * rng.uniform(0.9, 1.1) * (4 if rng.random() < 0.01 else 1)
        ahead.observe(width, way if way == last else None, seconds)
        total, n_ahead, last = total + seconds, n_ahead + way, way
    return n_ahead / n, total


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.2), (1.0, 3.0)])
def test_the_better_way_is_used_nearly_always(fast, slow):
    for seed in range(6):
        share, total = play(Ahead(), lambda way, i: fast if way else slow, 1500, seed=seed)
        assert share > 0.95 and total < 1.08 * 1500 * fast * 1.03
        share, total = play(Ahead(), lambda way, i: slow if way else fast, 1500, seed=seed)
        assert share < 0.08


def test_a_short_answer_is_never_bothered():
    assert play(Ahead(), lambda way, i: 1.0, 30)[0] == 1.0


def test_growing_contexts_turn_the_balance():
    ahead = Ahead()
    grows = lambda way, i: 1.0 + i / 1000 if way else 2.0  # noqa: E731
    assert play(ahead, grows, 900)[0] > 0.9
    assert play(ahead, lambda way, i: grows(way, i + 2000), 900)[0] < 0.5
    assert ahead.pays(2) and not ahead.pays(4)  # widths are apart
