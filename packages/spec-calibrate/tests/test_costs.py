import math
import random

import pytest

from spec_calibrate.costs import PLAIN, LiveCosts


def test_without_rounds_the_measured_curves_hold():
    costs = LiveCosts()
    assert costs.plain_factor() == 1.0
    assert costs.factors("dspark", 4) == [1.0] * 4


def test_a_width_that_runs_slower_is_corrected():
    costs, rng = LiveCosts(), random.Random(0)
    for _ in range(30):
        costs.observe(("dspark", 5), 1.5 * rng.uniform(0.95, 1.05), 1.0)
    assert costs.factors("dspark", 8)[4] == pytest.approx(1.5, rel=0.05)


def test_neighbours_follow_more_than_distant_widths_and_plain_steps():
    costs = LiveCosts()
    for _ in range(10):
        costs.observe(PLAIN, 1.0, 1.0)
        costs.observe(("dspark", 8), 2.0, 1.0)
    factors = costs.factors("dspark", 16)
    assert factors[7] > 1.8 and factors[6] > 1.7
    assert factors[0] < factors[5] < factors[6]
    assert costs.plain_factor() == pytest.approx(1.0, abs=0.05)


def test_drift_common_to_all_is_expected_of_widths_not_seen():
    costs = LiveCosts()
    for width in (1, 2, 3, 4):
        for _ in range(10):
            costs.observe(("dspark", width), 1.6, 1.0)
            costs.observe(PLAIN, 1.6, 1.0)
    assert costs.factors("dspark", 16)[15] == pytest.approx(1.6, rel=0.05)
    assert math.exp(costs.drift) == pytest.approx(1.6, rel=0.05)


def test_hope_is_for_widths_not_seen_lately():
    costs = LiveCosts()
    for _ in range(12):
        costs.observe(("dspark", 9), 2.0, 1.0)
    likely, hopeful = costs.factors("dspark", 9), costs.factors("dspark", 9, hopeful=True)
    assert hopeful[3] < 1.0 < likely[3]  # width 4 may be as cheap as measured
    assert hopeful[8] > 1.8  # width 9 is known to be dear


def test_one_slow_round_moves_little():
    costs = LiveCosts()
    for _ in range(12):
        costs.observe(("dspark", 4), 1.0, 1.0)
    costs.observe(("dspark", 4), 50.0, 1.0)
    assert costs.factors("dspark", 4)[3] < 1.06


@pytest.mark.parametrize(("seconds", "predicted"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_round_without_a_time_teaches_nothing(seconds: float, predicted: float):
    costs = LiveCosts()
    costs.observe(("dspark", 4), seconds, predicted)
    assert costs.factors("dspark", 4) == [1.0] * 4


def test_the_sources_are_kept_apart():
    costs = LiveCosts()
    for _ in range(12):
        costs.observe(PLAIN, 1.0, 1.0)
        costs.observe(("lookup", 4), 1.0, 1.0)
        costs.observe(("dspark", 4), 3.0, 1.0)
    assert costs.factors("lookup", 4)[3] < 1.1
    assert costs.factors("dspark", 4)[3] > 2.3


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_third_stray_round_in_a_row_is_a_change(factor: float):
    costs = LiveCosts()
    for _ in range(12):
        costs.observe(("dspark", 4), 1.0, 1.0)
    for seconds in (factor, factor, 1.0, factor, 1 / factor, factor):
        costs.observe(("dspark", 4), seconds, 1.0)
    assert costs.factors("dspark", 4)[3] == pytest.approx(1.0, abs=0.2)
    for _ in range(3):
        costs.observe(("dspark", 4), factor, 1.0)
    assert costs.factors("dspark", 4)[3] == pytest.approx(factor, rel=0.4)
