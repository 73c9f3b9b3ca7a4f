"""Drafting in a crowd: parked where it does not pay, kept where it does."""

import random

import pytest

from spec_core import FixedCap, Pair, Sampling, generate
from spec_core.batch import Batch
from spec_drafters import LookupDrafter
from spec_server.crowd import CrowdCap
from spec_targets import load_target


def simulate(plain_rate, drafted_rate, n=3000, noise=0.1, width=4, seed=0):
    """Rounds of 10 tokens; returns the speed reached against the better way's."""
    rng, crowd = random.Random(seed), CrowdCap()
    seconds = 0.0
    for _ in range(n):
        drafted = crowd.may_draft(width)
        rate = (drafted_rate if drafted else plain_rate) * rng.uniform(1 - noise, 1 + noise)
        seconds += 10 / rate
        crowd.observe(width, drafted, 10, 10 / rate)
    return 10 * n / seconds / max(plain_rate, drafted_rate), crowd


@pytest.mark.parametrize(("plain", "drafted"), [(100, 40), (100, 90), (100, 110), (100, 300)])
def test_the_better_way_is_used_nearly_always(plain, drafted):
    for seed in range(5):
        share, crowd = simulate(plain, drafted, seed=seed)
        assert share > 0.97
        assert crowd.parked(4) == (plain > drafted)


def test_a_change_is_noticed():
    crowd = CrowdCap()
    rates = {True: 40.0, False: 100.0}
    drafted = []
    for n in range(6000):
        if n == 2000:
            rates = {True: 250.0, False: 100.0}
        way = crowd.may_draft(8)
        drafted.append(way)
        crowd.observe(8, way, 10, 10 / rates[way])
    assert sum(drafted[500:2000]) < 60 and sum(drafted[-1000:]) > 900


def test_widths_are_apart_and_odd_figures_do_no_harm():
    crowd = CrowdCap()
    for _ in range(50):
        crowd.observe(2, crowd.may_draft(2), 10, 0.1)
        crowd.observe(3, crowd.may_draft(3), 0, 0.0)
    assert crowd.may_draft(3) is True and not crowd.parked(3) and not crowd.parked(9)


class Never:
    """A crowd that never drafts, and counts what it is told."""

    def __init__(self):
        self.seen = []

    def may_draft(self, width):
        return False

    def observe(self, width, drafted, n_tokens, seconds):
        self.seen.append((width, drafted, n_tokens))


def test_a_parked_crowd_decodes_plainly_with_the_same_ids(folder):
    target, _ = load_target(folder)
    crowd = Never()
    batch = Batch(target, crowd=crowd)
    samplings = [Sampling(), Sampling(), Sampling(temperature=1.0, seed=5)]
    prompts = [[20 + i, 21, 22, 23] * 4 for i in range(3)]
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        pair = Pair(target, LookupDrafter(min_match=1))
        batch.add(pair, prompt, max_tokens=40, sampling=sampling, cap=FixedCap(4), tag=i)
    got, drafted = {0: [], 1: [], 2: []}, {0: 0, 1: 0, 2: 0}
    while batch.rows:
        shared = len(batch.rows) == 3 and batch.width == 3
        for row, round_ in batch.step():
            assert not isinstance(round_, Exception)
            got[row.tag] += round_.tokens
            drafted[row.tag] += round_.n_drafted if shared else 0
            if round_.finish_reason:
                batch.remove(row)
    for i in range(3):
        pair = Pair(target, LookupDrafter(min_match=1))
        rounds = generate(pair, prompts[i], max_tokens=40, sampling=samplings[i], cap=FixedCap(4))
        assert got[i] == [t for r in rounds for t in r.tokens]
    assert drafted[0] == drafted[1] == 0 and drafted[2] > 0  # its draws depend on its drafts
    assert crowd.seen and all(width in (2, 3) and not way for width, way, _ in crowd.seen)
