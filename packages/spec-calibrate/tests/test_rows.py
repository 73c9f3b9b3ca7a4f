"""Costs of verifies that several sequences share: measured lazily, kept, interpolated."""

from spec_calibrate import Key, RowCurves, Store, measure_rows
from spec_core import StateError, TargetOutput
from spec_core.testing import ToyTarget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Rows:
    def __init__(self, n):
        self.n, self.is_open = n, False


class Scripted(ToyTarget):
    """A shared verify costs 1 ms, and 0.1 ms per position."""

    def __init__(self, clock, slow=1.0):
        super().__init__()
        self.clock, self.slow, self.calls = clock, slow, []

    def join(self, caches):
        return Rows(len(caches))

    def verify_rows(self, blocks, cache, *, taps=()):
        if cache.is_open:
            raise StateError("open")
        cache.is_open = True
        assert blocks.shape[0] == cache.n
        self.calls.append(blocks.shape)
        self.clock.now += self.slow * (1e-3 + 1e-4 * blocks.size)
        single = self.make_cache()
        logits = super().verify(blocks[0], single).logits
        return TargetOutput(logits[None])

    def commit_rows(self, cache, n_keep):
        assert cache.is_open and n_keep == [0] * cache.n
        cache.is_open = False


def test_the_curve_is_what_verifies_cost():
    clock = Clock()
    curve = measure_rows(Scripted(clock), 4, 9, clock=clock)
    assert curve.at == (1, 2, 4, 8, 9)
    for width, seconds in zip(curve.at, curve.seconds, strict=True):
        assert abs(seconds - (1e-3 + 4e-4 * width)) < 1e-9


def test_a_slow_machine_is_asked_for_little():
    clock = Clock()
    target = Scripted(clock, slow=100)
    curve = measure_rows(target, 8, 33, budget_s=0.3, clock=clock)
    assert curve.at == (1, 2) and len(target.calls) == 4
    assert curve(33) > curve(2)  # the slope goes on


def test_what_is_compiled_first_is_no_cost():
    """A first pass of three seconds, and one of two a little later, as for a graph's trial."""
    clock = Clock()
    target = Scripted(clock)
    verify_rows, met = target.verify_rows, []

    def slow_at_first(block, cache, taps=()):
        met.append(block.shape[1])
        clock.now += {1: 3.0, 3: 2.0}.get(met.count(block.shape[1]), 0.0)
        return verify_rows(block, cache)

    target.verify_rows = slow_at_first
    curve = measure_rows(target, 4, 9, clock=clock)
    assert curve.at == (1, 2, 4, 8, 9)
    for width, seconds in zip(curve.at, curve.seconds, strict=True):
        assert abs(seconds - (1e-3 + 4e-4 * width)) < 1e-9


def test_sizes_are_measured_once_and_only_when_asked_for(tmp_path):
    clock = Clock()
    target = Scripted(clock)
    key = Key("device", "system", "0", model="m")
    curves = RowCurves(target, 5, key=key, store=Store(tmp_path), clock=clock)
    assert not target.calls
    three, n = curves(3), len(target.calls)
    assert {shape[0] for shape in target.calls} == {2, 4}
    assert abs(three(5) - (1e-3 + 15e-4)) < 1e-9
    assert curves(3) == three and curves(4)(1) > curves(2)(1) and len(target.calls) == n
    again = RowCurves(target, 5, key=key, store=Store(tmp_path), clock=clock)
    assert abs(again(4)(5) - curves(4)(5)) < 1e-9 and len(target.calls) == n
    wider = RowCurves(target, 9, key=key, store=Store(tmp_path), clock=clock)
    assert wider(4).at[-1] == 9 and len(target.calls) > n


def test_what_cannot_be_measured_is_unknown():
    class Full(Scripted):
        def join(self, caches):
            raise RuntimeError("[malloc] no memory")

    assert RowCurves(Full(Clock()), 5)(4) is None


def test_a_clock_that_stands_or_goes_back_tells_no_cost(tmp_path):
    key = Key("device", "system", "0", model="m")
    for step in (0.0, -1e-3):
        clock = Clock()
        target = Scripted(clock, slow=0)

        def now(clock=clock, step=step):
            clock.now += step
            return clock.now

        assert RowCurves(target, 5, key=key, store=Store(tmp_path), clock=now)(4) is None
        assert len(target.calls) < 200
