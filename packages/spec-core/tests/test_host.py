import math

import mlx.core as mx

from spec_core.host import floats_as_ints, ints_as_floats


def test_floats_keep_their_bits_through_a_read_of_integers():
    values = [0.0, 1.0, -2.5, 0.1, 3e-39, math.inf]
    expected = tuple(mx.array(values).tolist())
    assert ints_as_floats(floats_as_ints(mx.array(values)).tolist()) == expected


def test_half_precision_travels_as_float32():
    assert ints_as_floats(floats_as_ints(mx.array([0.25], mx.float16)).tolist()) == (0.25,)


def test_nothing_stays_nothing():
    assert ints_as_floats([]) == ()
