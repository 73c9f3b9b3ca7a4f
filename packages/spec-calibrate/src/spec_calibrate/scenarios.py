"""The scenarios that a cap must master: machines, acceptance processes, and what changes midway.

Machines are shaped after measurements: a device that has rows to spare, one whose few-row kernels
end at a width, one where each row costs what a step costs, a slow drafter beside a fast target.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from spec_calibrate.simulate import Accept, Machine, Scenario

_MS = 1e-3


def _steps(at: int, before: float, after: float) -> Callable[[int], float]:
    """Extra cost per row: `before` up to width `at`, `after` beyond it."""
    return lambda w: _MS * (before * (min(w, at) - 1) + after * max(0, w - at))


def _verify(base: float, extra: Callable[[int], float]) -> Callable[[int], float]:
    return lambda w: _MS * base + extra(w)


def _level(ms: float) -> Callable[[int], float]:
    return lambda cap: _MS * ms


def _per_draft(ms: float, fixed: float = 0.0) -> Callable[[int], float]:
    return lambda cap: _MS * (fixed + ms * cap)


ROOMY = Machine("roomy", 10 * _MS, _verify(10.2, _steps(16, 0.1, 0.1)), _level(2), 1 * _MS)
KNEE = Machine("knee", 10 * _MS, _verify(10.2, _steps(6, 0.4, 3.0)), _level(2), 1 * _MS)
CLIFF = Machine(
    "cliff",
    10 * _MS,
    lambda w: _MS * (10.2 + 0.3 * w + (9.0 if w > 5 else 0.0)),
    _level(2),
    1 * _MS,
)
STEEP = Machine("steep", 10 * _MS, _verify(10.0, _steps(32, 6.0, 6.0)), _level(1.5), 0.3 * _MS)
CHAIN = Machine("chain", 10 * _MS, _verify(10.2, _steps(8, 0.4, 1.0)), _per_draft(1.5), 1 * _MS)
DEAR = Machine("dear", 3 * _MS, _verify(3.1, _steps(8, 0.2, 0.2)), _level(5), 1 * _MS)
LOOKUP = Machine("lookup", 10 * _MS, _verify(10.2, _steps(8, 0.3, 0.8)), _level(0.05), 1 * _MS)
LEVEL = Machine("level", 4.4 * _MS, _verify(4.4, _steps(8, 0.03, 0.03)), _level(1), 0.4 * _MS)
DEEP = replace(KNEE, name="deep", depth_s=1e-3 * _MS)

MACHINES = (ROOMY, KNEE, CLIFF, STEEP, CHAIN, DEAR)


def steady(*rates: float) -> Accept:
    """The same rates everywhere, by position; the last one goes on."""
    return lambda place, i: rates[min(i, len(rates) - 1)]


def bursty(low: float, high: float, mean_run: int, seed: int = 0) -> Accept:
    """Stretches of easy and hard text with geometric lengths."""
    rng = random.Random(seed)
    levels: list[float] = []

    def accept(place: int, i: int) -> float:
        while len(levels) <= place + i:
            stay = levels and rng.random() >= 1 / mean_run
            levels.append(levels[-1] if stay else rng.choice((low, high)))
        return levels[place + i]

    return accept


def moving(start: float, end: float, n_tokens: int) -> Accept:
    """Rates that move evenly from one value to another over the text."""
    return lambda place, i: start + (end - start) * min(1.0, place / n_tokens)


def switched(rates: Sequence[float], every: int) -> Accept:
    """Rates that switch in turn after so many tokens."""
    return lambda place, i: rates[((place + i) // every) % len(rates)]


def busy_host(slow: float, mean: float, seed: int = 0) -> Callable[[float, int], float]:
    """Every kind of round slower while another job runs; stretches of so much of the text."""
    rng = random.Random(seed)
    ends, levels = [0.0], [1.0]

    def drift(share: float, width: int) -> float:
        while ends[-1] <= share:
            ends.append(ends[-1] + rng.expovariate(1 / mean))
            levels.append(rng.choice((1.0, slow)))
        return levels[bisect.bisect_right(ends, share)]

    return drift


def copies(every: int, length: int) -> Callable[[int], int]:
    """Drafts a lookup has: none for `every` tokens, then what is left of a run of `length`."""
    period = every + length

    def offers(place: int) -> int:
        into = place % period
        return period - into if into >= every else 0

    return offers


def steady_scenarios() -> list[Scenario]:
    """Rates that stay as they are, on every machine."""
    processes = {
        "poor": steady(0.35),
        "fair": steady(0.6),
        "good": steady(0.75),
        "excellent": steady(0.92),
        "falling": steady(0.8, 0.7, 0.55, 0.4, 0.3),
    }
    return [
        Scenario(f"{name} / {machine.name}", machine, accept)
        for machine in MACHINES
        for name, accept in processes.items()
    ] + [
        Scenario("long block / roomy", ROOMY, steady(0.9), max_draft=15),
        Scenario("good / deep context", DEEP, steady(0.8), depth=8000),
        Scenario("short text / knee", KNEE, steady(0.7), n_tokens=300),
        Scenario("cliff not calibrated", CLIFF, steady(0.85), believed=ROOMY),
        _lookup("some copies", 60, 40),
        _lookup("few copies", 300, 20),
        _lookup("mostly copies", 10, 200),
    ]


def _lookup(name: str, every: int, length: int) -> Scenario:
    offers = copies(every, length)
    accept = steady(0.97)
    return Scenario(f"{name} / lookup", LOOKUP, accept, 2000, max_draft=16, offers=offers)


def changing_scenarios() -> list[Scenario]:
    """Text or machine change under way."""
    n = 3000
    return [
        Scenario("bursty / knee", KNEE, bursty(0.3, 0.95, 60), n),
        Scenario("bursty, short runs / knee", KNEE, bursty(0.3, 0.95, 15), n),
        Scenario("bursty / roomy", ROOMY, bursty(0.1, 0.95, 100), n),
        Scenario("bursty / steep", STEEP, bursty(0.3, 0.98, 80), n),
        Scenario("switching / chain", CHAIN, switched((0.9, 0.3), 250), n),
        Scenario(
            "switching, busy host / level",
            LEVEL,
            switched((0.4, 0.88), 320),
            n,
            drift=busy_host(1.5, 0.02),
            noise=0.08,
        ),
        Scenario("improving / knee", KNEE, moving(0.0, 0.95, n), n),
        Scenario("improving / roomy", ROOMY, moving(0.0, 0.95, n), n),
        Scenario("worsening / knee", KNEE, moving(0.95, 0.0, n), n),
        Scenario("wakes up late / knee", KNEE, switched((0.0, 0.9), n // 2), n),
        Scenario("hotter / knee", KNEE, steady(0.75), n, drift=lambda x, w: 1 + 0.6 * (x > 0.4)),
        Scenario(
            "verify gets dear / roomy",
            ROOMY,
            steady(0.75),
            n,
            drift=lambda x, w: 2.5 if x > 0.4 and w > 1 else 1.0,
        ),
        Scenario(
            "wide verify gets dear / roomy",
            ROOMY,
            steady(0.85),
            n,
            drift=lambda x, w: 2.0 if x > 0.4 and w > 4 else 1.0,
        ),
        Scenario(
            "verify gets cheap / steep",
            STEEP,
            steady(0.8),
            n,
            drift=lambda x, w: 0.4 if x > 0.4 and w > 1 else 1.0,
        ),
    ]


def hostile_scenarios() -> list[Scenario]:
    """A drafter that is never right: what counts is the speed of plain decoding."""
    return [
        Scenario(f"hostile, {n} tokens / {machine.name}", machine, steady(0.0), n_tokens=n)
        for machine in MACHINES
        for n in (500, 1500)
    ] + [Scenario("hostile, long block / roomy", ROOMY, steady(0.0), 500, max_draft=15)]


def random_scenario(rng: random.Random) -> Scenario:
    """A machine and a drafter drawn from wide ranges, for checks that nothing was tuned on."""
    plain = rng.uniform(2.0, 40.0) * _MS
    block = rng.choice((3, 4, 5, 7, 8, 10, 15, 16))
    slope = plain * 10 ** rng.uniform(-2.5, -0.15)
    bend, steeper = rng.randint(2, block + 1), rng.choice((1, 1, 2, 5))
    jump, after = plain * rng.choice((0, 0, 0, 0.3, 0.8)), rng.randint(2, block + 1)
    first = plain * rng.uniform(1.0, 1.08)

    def verify_s(width: int) -> float:
        rows = min(width, bend) - 1 + steeper * max(0, width - bend)
        return first + slope * rows + (jump if width > after else 0.0)

    fixed = plain * 10 ** rng.uniform(-2.0, -0.2)
    each = rng.choice((0.0, 0.0, plain * 10 ** rng.uniform(-2.0, -0.7)))
    overhead = plain * rng.uniform(0.01, 0.15)
    machine = Machine("random", plain, verify_s, lambda cap: fixed + each * cap, overhead)
    rate, fall = rng.uniform(0.2, 0.97), rng.choice((1.0, 1.0, 0.95, 0.85))
    accept = steady(*(rate * fall**i for i in range(block)))
    n_tokens = rng.choice((256, 512, 1024, 2048))
    return Scenario("random", machine, accept, n_tokens, block, curve_error=0.05)
