import random
import statistics

import pytest

from spec_calibrate.acceptance import Frequency, SourceHistory


def test_without_rounds_the_assumed_rates_hold():
    rates, hopes = Frequency((0.8, 0.6)).estimates(4, z=1.0)
    assert rates == pytest.approx([0.8, 0.6, 0.6, 0.6])
    assert all(h > r for h, r in zip(hopes, rates, strict=True))


def test_an_average_comes_close_to_the_rate_it_sees():
    rng, frequency = random.Random(0), Frequency((0.7,))
    for _ in range(400):
        frequency.age()
        frequency.add(0, float(rng.random() < 0.25))
    assert frequency.estimates(1)[0][0] == pytest.approx(0.25, abs=0.1)


def test_a_position_never_reached_takes_the_rate_of_the_one_before():
    frequency = Frequency((0.7,))
    for _ in range(200):
        frequency.age()
        frequency.add(0, 1.0)
    first, second, third = frequency.estimates(3)[0]
    assert first > 0.95 and second > 0.9 and third > 0.85


def test_a_position_beyond_the_cap_goes_where_the_ones_before_it_go():
    """A hard text was drafted in whole blocks; in an easy one only three drafts are asked for."""

    def risen(seed):
        rates, chance = Frequency((0.7,)), random.Random(seed)

        def rounds(n, cap, rate):
            for _ in range(n):
                rates.age()
                for i in range(cap):
                    accepted = chance.random() < rate
                    rates.add(i, float(accepted))
                    if not accepted:
                        break
            return rates.estimates(7)[0]

        return [-a + b for a, b in zip(rounds(200, 7, 0.5), rounds(30, 3, 0.9), strict=True)]

    by_seed = [risen(seed) for seed in range(10)]
    mean = [statistics.mean(position) for position in zip(*by_seed, strict=True)]
    assert min(mean[:3]) > 0.15 and mean[3] > 0.1 and min(mean[4:]) > 0.04


def test_recent_rounds_count_more_than_old_ones():
    frequency = Frequency((0.7,))
    for outcome in [1.0] * 100 + [0.0] * 100:
        frequency.age()
        frequency.add(0, outcome)
    assert frequency.estimates(1)[0][0] < 0.25


def test_fading_raises_hope_but_keeps_the_rate_near_what_was_learnt():
    frequency = Frequency((0.7,))
    for _ in range(300):
        frequency.age()
        frequency.add(0, 0.0)
    rate, hope = (x[0] for x in frequency.estimates(1, z=1.0))
    frequency.age(500)
    faded_rate, faded_hope = (x[0] for x in frequency.estimates(1, z=1.0))
    assert faded_hope - faded_rate > 2 * (hope - rate)
    assert faded_rate < 0.1  # not back at the 0.7 once assumed


def test_only_the_first_rejected_draft_counts_as_a_rejection():
    history = SourceHistory((0.5,))
    for _ in range(300):
        history.age()
        history.add(cap=4, n_drafted=4, n_accepted=2)
    rates = history.outlook(4, z=0.0).rates
    assert rates[0] > 0.9 and rates[1] > 0.9 and rates[2] < 0.1


def test_a_miss_lowers_the_chance_of_a_draft_not_the_acceptance_of_drafts():
    history = SourceHistory((0.7,))
    for i in range(400):
        history.age()
        history.add(cap=4, n_drafted=4 if i % 10 == 0 else 0, n_accepted=4 if i % 10 == 0 else 0)
    outlook = history.outlook(4, z=0.0)
    assert outlook.sent[0] == pytest.approx(0.1, abs=0.04)
    assert outlook.rates[0] == pytest.approx(0.1, abs=0.04)
    assert outlook.rates[1] > 0.85 and outlook.sent[1] > 0.9


def test_outlook_counts_tokens_for_every_cap():
    outlook = SourceHistory((0.5,)).outlook(3, z=1.0)
    assert outlook.tokens() == pytest.approx([1.0, 1.5, 1.75, 1.875])


def test_hope_may_begin_at_a_later_position():
    outlook = SourceHistory((0.5,)).outlook(3, z=1.0)
    likely, later, all_of_it = outlook.tokens(), outlook.tokens(2), outlook.tokens(0)
    assert later[:3] == likely[:3] and later[3] > likely[3]
    assert all_of_it[1] > likely[1]


def test_confidence_steadies_the_average():
    """With a confidence that is right on average, estimates scatter less around the true rate."""

    def scatter(with_confidence: bool) -> float:
        rng, total = random.Random(1), 0.0
        history = SourceHistory((0.6,))
        for n in range(2000):
            sure = rng.choice((0.3, 0.9))
            accepted = int(rng.random() < sure)
            history.age()
            history.add(1, 1, accepted, (sure,) if with_confidence else None)
            if n > 100:
                total += (history.outlook(1, z=0.0).rates[0] - 0.6) ** 2
        return total

    assert scatter(True) < 0.8 * scatter(False)
