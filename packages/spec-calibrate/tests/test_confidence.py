import math
import random
from collections.abc import Sequence

import pytest

from spec_calibrate.confidence import (
    Sample,
    calibrated,
    evaluate,
    expected_calibration_error,
    fit_temperatures,
    samples_of,
    tempered,
)
from spec_core import Round


def _round(n_drafted: int, n_accepted: int, confidence: Sequence[float] | None) -> Round:
    return Round(
        tokens=(0,) * (n_accepted + 1),
        text="",
        kind="verify",
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        source="dspark",
        near_ties=0,
        elapsed_s=0.01,
        finish_reason=None,
        confidence=None if confidence is None else tuple(confidence),
    )


def _drawn(n: int, temperatures: Sequence[float], seed: int = 0) -> list[Sample]:
    """Samples whose true probability is the confidence at the given temperature."""
    rng, samples = random.Random(seed), []
    for i in range(n):
        position = i % len(temperatures)
        logit = rng.gauss(0.5, 2.0)
        stated = 1 / (1 + math.exp(-logit))
        true = 1 / (1 + math.exp(-logit / temperatures[position]))
        samples.append(Sample(position, stated, rng.random() < true))
    return samples


def test_drafts_after_the_first_rejection_are_not_counted():
    rounds = [_round(4, 2, (0.9, 0.8, 0.7, 0.6)), _round(2, 2, (0.5, 0.4)), _round(3, 1, None)]
    assert samples_of(rounds) == [
        Sample(0, 0.9, True),
        Sample(1, 0.8, True),
        Sample(2, 0.7, False),
        Sample(0, 0.5, True),
        Sample(1, 0.4, True),
    ]


def test_temperature_one_changes_nothing_and_a_high_one_tempers():
    assert tempered(0.8, 1.0) == pytest.approx(0.8)
    assert tempered(0.8, 2.0) == pytest.approx(2 / 3)
    assert tempered(0.5, 7.0) == pytest.approx(0.5)


@pytest.mark.parametrize("confidence", [float("nan"), -0.1, 1.1, float("inf")])
def test_a_confidence_that_is_no_probability_says_nothing(confidence: float):
    assert tempered(confidence, 2.0) == 0.5


def test_certainty_stays_finite():
    assert 0.99 < tempered(1.0, 1.0) < 1.0
    assert 0.0 < tempered(0.0, 1.0) < 0.01


def test_the_fit_finds_the_temperatures_that_made_the_samples():
    fitted = fit_temperatures(_drawn(24_000, (1.0, 2.5, 0.6)))
    assert fitted == pytest.approx((1.0, 2.5, 0.6), rel=0.08)


def test_a_position_with_few_samples_leans_on_the_others():
    samples = [*_drawn(6000, (2.0,)), Sample(1, 0.9, True), Sample(1, 0.8, True)]
    assert fit_temperatures(samples)[1] == pytest.approx(2.0, rel=0.3)


def test_without_samples_there_is_nothing_to_fit():
    assert fit_temperatures([]) == ()
    assert evaluate([]).ece_after == 0.0


def test_outcomes_that_are_all_alike_keep_the_temperature_in_range():
    for accepted in (True, False):
        (temperature,) = fit_temperatures([Sample(0, 0.9, accepted)] * 500)
        assert 0.05 <= temperature <= 20.0


def test_a_draft_longer_than_the_fit_uses_the_last_temperature():
    expected = (tempered(0.9, 1.0), tempered(0.9, 3.0), tempered(0.9, 3.0))
    assert calibrated((0.9, 0.9, 0.9), (1.0, 3.0)) == expected


def test_the_calibration_error_equals_one_worked_out_by_hand():
    probabilities = [0.95, 0.95, 0.95, 0.95, 0.05, 0.05]
    accepted = [True, True, True, False, False, True]
    # bins: four at 0.95 of which 0.75 happened, two at 0.05 of which 0.5 happened
    by_hand = (4 * abs(0.95 - 0.75) + 2 * abs(0.05 - 0.5)) / 6
    assert expected_calibration_error(probabilities, accepted) == pytest.approx(by_hand)


def test_a_probability_of_one_has_a_bin():
    assert expected_calibration_error([1.0, 1.0], [True, False]) == pytest.approx(0.5)


def test_fitting_lowers_the_error_on_samples_not_fitted_to():
    found = evaluate(_drawn(6000, (3.0, 3.0)))
    assert found.n_samples == 6000
    assert found.ece_before > 0.08
    assert found.ece_after < 0.3 * found.ece_before
    assert found.temperatures == pytest.approx((3.0, 3.0), rel=0.15)


def test_fitting_does_not_spoil_a_confidence_that_is_right():
    found = evaluate(_drawn(6000, (1.0,)))
    assert found.ece_after < found.ece_before + 0.01


@pytest.mark.parametrize("confidence", [float("nan"), float("inf"), -5.0, 7.0])
def test_a_confidence_that_is_no_probability_is_judged_as_one_half(confidence: float):
    found = evaluate([Sample(0, confidence, True), Sample(0, confidence, True)])
    assert found.ece_before == 0.5
