import itertools
from dataclasses import replace

import pytest

from spec_calibrate import Curve, Curves, best_cap, expected_tokens, speedups
from spec_calibrate.expected import TYPICAL_ACCEPTANCE

RATES = (0.9, 0.5, 0.7, 0.2)


@pytest.mark.parametrize("cap", range(5))
def test_expected_tokens_equal_the_sum_over_all_outcomes(cap: int):
    total = 0.0
    for outcome in itertools.product([True, False], repeat=cap):
        chance = 1.0
        for accepted, rate in zip(outcome, RATES, strict=False):
            chance *= rate if accepted else 1 - rate
        n_accepted = next((i for i, accepted in enumerate(outcome) if not accepted), cap)
        total += chance * (n_accepted + 1)
    assert expected_tokens(RATES, cap) == pytest.approx(total)


def test_the_last_rate_holds_for_all_further_positions():
    assert expected_tokens((0.5,), 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_without_rates_a_typical_one_is_assumed():
    assert expected_tokens((), 1) == pytest.approx(1 + TYPICAL_ACCEPTANCE)


def _curves(*verify: float, draft: float = 0.0, acceptance: tuple[float, ...] = (0.8,)) -> Curves:
    widths = tuple(range(1, len(verify) + 1))
    return Curves(
        verify=((0, Curve(widths, verify)),),
        plain=Curve((0,), (10.0,)),
        draft={"dspark": Curve((1,), (draft,))},
        acceptance=acceptance,
        max_draft=len(verify) - 1,
    )


def test_the_best_cap_lies_before_a_cliff():
    choice = best_cap(_curves(10, 10, 10, 20, 20, draft=1))
    assert choice.cap == 2
    assert choice.speedup == pytest.approx((1 + 0.8 + 0.64) * 10 / 11)


def test_no_cap_pays_where_each_row_costs_a_step():
    choice = best_cap(_curves(10, 20, 30, draft=1))
    assert (choice.cap, choice.speedup) == (0, 1.0)


def test_a_free_source_pays_where_a_dear_one_does_not():
    curves = _curves(10, 11, 12, draft=20)
    assert best_cap(curves).cap == 0
    assert best_cap(curves, source="lookup").cap == 2


def test_beyond_its_block_a_source_gives_nothing_and_costs_nothing():
    curves = replace(_curves(10, 10, 10, 90, 90, draft=1), blocks={"dspark": 2})
    assert speedups(curves)[2:] == [speedups(curves)[2]] * 3


def test_a_whole_block_that_pays_leaves_the_cap_open_for_sources_that_go_further():
    cheap = replace(_curves(10, 10, 10, 10, 10, draft=1), blocks={"dspark": 2})
    assert best_cap(cheap).cap == 4
    steep = replace(_curves(10, 11, 30, 50, 70, draft=1), blocks={"dspark": 2})
    assert best_cap(steep).cap == 1


def test_the_smaller_of_two_equal_caps_is_taken():
    assert best_cap(_curves(10, 10, 10, acceptance=(0.5, 0.0))).cap == 1


def test_speedups_start_with_plain_decoding():
    assert speedups(_curves(10, 11, 12))[0] == 1.0
    assert len(speedups(_curves(10, 11, 12), max_draft=9)) == 10
