"""The data and the measure of the checks; the checks themselves run with each operation."""

import mlx.core as mx
import pytest

from spec_kernels.numerics import MatmulShape, random_weight, relative_error


def test_random_weights_are_of_the_kind_asked_for():
    negative = random_weight(MatmulShape(32, 128, 4, 64, "float32"), "negative")
    assert negative.scales is not None and mx.all(negative.scales < 0)
    outliers = random_weight(MatmulShape(32, 128, 16, 64, "float32"), "outliers")
    assert mx.abs(outliers.w).max() > 20 * mx.abs(outliers.w[:, 1:61]).max()


def test_relative_error_is_nan_if_any_value_is():
    assert relative_error(mx.array([1.0, float("nan")]), mx.array([1.0, 2.0])) != 0
    assert str(relative_error(mx.array([float("nan")]), mx.array([2.0]))) == "nan"
    assert relative_error(mx.array([1.0, 4.0]), mx.array([1.0, 5.0])) == pytest.approx(0.2)
