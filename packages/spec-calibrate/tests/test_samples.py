import pytest

from spec_calibrate.samples import UNKNOWN_NOISE, Samples, doubling, widths_to_measure


def test_every_width_up_to_nine_is_measured_then_the_edges():
    assert widths_to_measure(5) == (1, 2, 3, 4, 5)
    assert widths_to_measure(33) == (*range(1, 10), 12, 16, 17, 20, 24, 25, 28, 32, 33)
    assert widths_to_measure(18)[-1] == 18


def test_some_of_the_places_double_and_keep_both_ends():
    assert doubling(range(1, 34)) == [1, 2, 4, 8, 16, 32, 33]
    assert doubling((1, 2, 3, 4, 5)) == [1, 2, 4, 5]
    assert doubling([7]) == [7]


def test_medians_and_spreads_are_by_place():
    samples = Samples({4: [2.0, 2.2, 9.0], 1: [1.0, 1.0, 1.1]})
    assert samples.places == [1, 4]
    assert samples.medians == [1.0, 2.2]
    assert samples.spreads == pytest.approx([0.0, 0.2])
    assert samples.noise == pytest.approx((0.0 + 0.2 / 2.2) / 2)


def test_the_noise_of_two_passes_is_not_known():
    assert Samples({1: [1.0, 1.0]}).noise == UNKNOWN_NOISE


def test_a_curve_rises_where_medians_fall_within_their_spread():
    steady = [3.0, 3.0, 3.0, 3.0]
    curve = Samples({1: [1.0] * 4, 2: [2.0, 4.0, 2.1, 3.9], 3: [1.9, 3.9, 2.0, 3.8], 4: steady})
    seconds = curve.curve().seconds
    assert list(seconds) == sorted(seconds)
    assert seconds[1] == seconds[2]
