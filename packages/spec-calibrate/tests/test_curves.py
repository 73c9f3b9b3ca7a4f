import pytest

from spec_calibrate import Curve, Curves, knee
from spec_calibrate.curves import smooth


def _curve(*seconds: float) -> Curve:
    return Curve(tuple(range(1, len(seconds) + 1)), seconds)


def test_a_curve_is_linear_between_its_places():
    curve = Curve((1, 3, 7), (1.0, 2.0, 4.0))
    assert [curve(x) for x in (1, 2, 3, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0])


def test_beyond_its_ends_a_curve_is_level_before_and_goes_on_after():
    curve = Curve((2, 4), (1.0, 3.0))
    assert curve(1) == 1.0
    assert curve(6) == pytest.approx(5.0)


def test_a_falling_end_is_not_continued_downwards():
    assert Curve((1, 2), (3.0, 2.0))(10) == 2.0


def test_one_place_is_a_level_curve():
    assert Curve((4,), (0.5,))(1) == Curve((4,), (0.5,))(9) == 0.5


@pytest.mark.parametrize(
    ("at", "seconds", "message"),
    [
        ((), (), "at least one, got 0 places and 0 costs"),
        ((1, 2), (1.0,), "got 2 places and 1 costs"),
        ((2, 2), (1.0, 1.0), r"must ascend, got \(2, 2\)"),
        ((1,), (-1.0,), r"must be in 0\.\.86400 seconds"),
        ((1,), (float("nan"),), r"must be in 0\.\.86400 seconds"),
        ((1,), (float("inf"),), r"must be in 0\.\.86400 seconds"),
    ],
)
def test_a_curve_refuses_what_is_no_curve(at, seconds, message: str):
    with pytest.raises(ValueError, match=message):
        Curve(at, seconds)


def test_milliseconds_come_back_as_the_same_curve():
    curve = Curve((1, 10, 2000), (0.0123, 0.02, 1.5))
    assert Curve.from_ms(curve.to_ms()) == curve


@pytest.mark.parametrize("value", [{"1": "fast"}, {"1": True}, [1.0], {"one": 1.0}, {}])
def test_milliseconds_of_another_type_are_refused(value):
    with pytest.raises(ValueError):
        Curve.from_ms(value)


def test_a_verify_costs_more_in_a_deeper_context():
    curves = Curves(
        verify=((0, _curve(1.0, 2.0)), (100, _curve(2.0, 5.0))), plain=Curve((0,), (1.0,))
    )
    assert curves.verify_s(2, 0) == 2.0
    assert curves.verify_s(2, 50) == pytest.approx(3.5)
    assert curves.verify_s(2, 200) == pytest.approx(8.0)


def test_noise_does_not_make_a_deep_context_cheaper_than_the_deepest_measured():
    curves = Curves(verify=((0, _curve(2.0)), (100, _curve(1.9))), plain=Curve((0,), (1.0,)))
    assert curves.verify_s(1, 100_000) == 1.9


def test_a_round_is_draft_verify_and_overhead_but_a_plain_step_is_its_own_curve():
    curves = Curves(
        verify=((0, _curve(10.0, 11.0, 12.0)),),
        plain=Curve((0,), (9.0,)),
        draft={"dspark": Curve((1, 2), (3.0, 4.0))},
        overhead_s=0.5,
    )
    assert curves.round_s(2, 0, "dspark") == pytest.approx(4.0 + 12.0 + 0.5)
    assert curves.round_s(0, 0, "dspark") == 9.0


def test_a_source_that_was_not_measured_is_free():
    curves = Curves(verify=((0, _curve(10.0, 11.0)),), plain=Curve((0,), (9.0,)))
    assert curves.round_s(1, 0, "lookup") == 11.0


def test_the_source_of_the_curves_is_the_dearest_one():
    draft = {"lookup": Curve((1,), (0.001,)), "dspark": Curve((1,), (1.0,))}
    verify = ((0, _curve(1.0)),)
    assert Curves(verify=verify, plain=_curve(1.0), draft=draft).source == "dspark"
    assert Curves(verify=verify, plain=_curve(1.0)).source == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": ()}, "at least one"),
        ({"verify": ((9, _curve(1.0)), (3, _curve(1.0)))}, "Depths must ascend"),
        ({"overhead_s": -1.0}, "Overhead and noise must be finite and >= 0, got -1.0"),
        ({"noise": float("nan")}, "finite"),
        ({"acceptance": (0.5, 1.5)}, "in 0..1"),
        ({"max_draft": -1}, r"max_draft and blocks must be in 0\.\.4096, got -1"),
        ({"blocks": {"dspark": -2}}, "got 0 and {'dspark': -2}"),
        ({"max_draft": 10**9}, "got 1000000000"),
        ({"plain": _curve(0.0)}, "must take time"),
        ({"verify": ((0, _curve(0.0, 1.0)),)}, "must take time"),
    ],
)
def test_curves_refuse_figures_that_cannot_be(change, message: str):
    good = {"verify": ((0, _curve(1.0)),), "plain": _curve(1.0)}
    with pytest.raises(ValueError, match=message):
        Curves(**(good | change))


def test_the_knee_is_the_last_width_before_the_curve_bends_up():
    assert knee(_curve(10, 10.2, 10.4, 10.6, 13, 16, 19, 22)) == 4


def test_the_knee_of_a_cliff_is_the_width_before_it():
    assert knee(_curve(10, 10, 10, 10, 10, 19, 19, 19)) == 5


@pytest.mark.parametrize(
    "seconds", [(10, 10, 10), (10, 11, 12, 13, 14), (10, 14, 15, 15.5), (10, 9, 8), (10, 12)]
)
def test_a_level_straight_or_falling_curve_has_no_knee(seconds):
    assert knee(_curve(*seconds)) is None


def test_smoothing_averages_a_fall_within_the_noise():
    assert smooth([1.0, 3.0, 2.0, 4.0], [0.6] * 4) == pytest.approx((1.0, 2.5, 2.5, 4.0))


def test_smoothing_keeps_a_fall_beyond_the_noise():
    values = [1.0, 5.0, 5.1, 3.0]
    assert smooth(values, [0.1] * 4) == pytest.approx(values)


def test_smoothing_reaches_back_over_several_places():
    assert smooth([2.0, 2.4, 1.0], [2.0] * 3) == pytest.approx((1.8, 1.8, 1.8))
