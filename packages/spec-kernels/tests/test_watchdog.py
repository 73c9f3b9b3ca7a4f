"""When a verify counts as a stall."""

from spec_kernels.watchdog import WARMUP, Watchdog


def warm(seconds: float) -> Watchdog:
    watchdog = Watchdog()
    assert [watchdog.observe(seconds) for _ in range(WARMUP)] == [None] * WARMUP
    return watchdog


def test_a_verify_of_ten_medians_is_a_stall():
    watchdog = warm(0.05)
    assert watchdog.observe(0.49) is None
    assert watchdog.observe(0.51) == "a verify took 0.51 s, 10 times the median of 50.0 ms"


def test_short_verifies_never_stall_whatever_their_ratio():
    assert warm(0.001).observe(0.2) is None


def test_nothing_is_judged_before_there_is_a_median():
    watchdog = Watchdog()
    assert watchdog.observe(100.0) is None


def test_slow_growth_is_followed_not_reported():
    watchdog = warm(0.05)
    assert all(watchdog.observe(0.05 * 1.05**i) is None for i in range(80))
