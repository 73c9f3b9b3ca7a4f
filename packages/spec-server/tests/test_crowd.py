"""Drafting in a crowd: parked where it does not pay, kept where it does."""

import random

import pytest

from spec_calibrate import CapController, Curve, Curves
from spec_core import FixedCap, Pair, Round, Sampling, generate
from spec_core.batch import Batch
from spec_core.testing import ToyDrafter, ToyTarget
from spec_drafters import HybridDrafter, LookupDrafter
from spec_server.crowd import CrowdCap
from spec_server.engine import _crowd_of
from spec_server.jobs import Served
from spec_targets import load_target

MOST = 8


def made(cap: int, n_accepted: int) -> Round:
    return Round((0,) * (n_accepted + 1), "", "verify" if cap else "plain", cap, n_accepted,
                 "x", 0, 0.0, None, cap=cap)  # fmt: skip


SECONDS = {
    "rounds": lambda rng: 10 ** rng.uniform(-12, 6),
    "absurd": lambda rng: rng.choice([1e-320, 1e-300, 1e-12, 1e-9, 1e-3, 1.0, 1e6, 1e300, 1.7e308]),
}
COSTS = {
    "none": None,
    "nothing": lambda rows: lambda width: 0.0,
    "some": lambda rows: (lambda width: 1e-3 * rows * width) if rows % 2 else None,
    "absurd": lambda rows: lambda width: 1e300 / rows if width % 2 else 1e-300,
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("seconds", SECONDS)
def test_no_clock_makes_it_break_off(costs, seconds):
    for seed in range(50):
        rng = random.Random(seed)
        crowd = CrowdCap(
            rng.choice([1, 4, MOST]), COSTS[costs], lambda rows, cap: 1e-3 * rows * cap
        )
        for _ in range(150):
            width = rng.randint(1, 5)
            cap = crowd.cap(width)
            assert 0 <= cap <= MOST
            rounds = [made(cap, rng.randint(0, cap)) for _ in range(width)]
            crowd.observe(width, cap, rounds, SECONDS[seconds](rng))
            crowd.parked(width)


class Machine:
    """A scripted target and drafter: what rounds of so many rows cost, and what is accepted.

    Args:
        verify_s: Seconds by rows and block width.
        plain_s: Seconds of a pipelined plain step by rows.
        accept: Chance that a draft is accepted, given those before it.
    """

    def __init__(self, verify_s, plain_s, accept, noise=0.05, seed=0):
        self.verify_s, self.plain_s, self.accept = verify_s, plain_s, accept
        self.noise, self.rng = noise, random.Random(seed)
        self.seconds = self.n_tokens = 0.0
        self.caps = []

    def round(self, crowd, width):
        """One shared round, told to the crowd."""
        cap = crowd.cap(width)
        rounds = []
        for _ in range(width):
            n = 0
            while n < cap and self.rng.random() < self.accept:
                n += 1
            rounds.append(made(cap, n))
        cost = self.verify_s(width, 1 + cap) if cap else self.plain_s(width)
        cost *= self.rng.uniform(1 - self.noise, 1 + self.noise)
        if self.rng.random() < 0.01:
            cost *= 3
        crowd.observe(width, cap, rounds, cost)
        self.seconds += cost
        self.n_tokens += sum(len(r.tokens) for r in rounds)
        self.caps.append(cap)

    def of_plain(self, width):
        """Tokens per second against plain decoding."""
        return self.n_tokens / self.seconds * self.plain_s(width) / width

    def best(self, width):
        """The best fixed cap's, in expectation."""
        gains = [1.0]
        for k in range(1, MOST + 1):
            tokens = sum(self.accept**i for i in range(k + 1))
            gains.append(tokens * self.plain_s(width) / self.verify_s(width, 1 + k))
        return max(gains)


def plain(width):
    return 0.008 + 0.0002 * width


def free(width, block):
    """Memory-bound: more positions cost next to nothing."""
    return plain(width) * 1.1 + 0.00002 * width * block


def dear(width, block):
    """A few rows are nearly free; eight of them make every further position cost its share."""
    return plain(width) * 1.1 + 0.0012 * max(0, width * block - 8)


def curves(verify_s, off=1.0):
    widths = (1, 2, 4, 8, 9)
    return lambda rows: Curve(widths, tuple(off * verify_s(rows, w) for w in widths))


@pytest.mark.parametrize("known", [True, False])
def test_a_crowd_of_eight_parks_where_its_verify_is_dear_and_a_pair_goes_on(known):
    crowd = CrowdCap(MOST, curves(dear) if known else None)
    for width, parks in ((8, True), (2, False)):
        machine = Machine(dear, plain, accept=0.7, seed=width)
        for _ in range(1200):
            machine.round(crowd, width)
        assert machine.of_plain(width) > 0.965
        assert crowd.parked(width) == parks
        share = sum(cap > 0 for cap in machine.caps[200:]) / 1000
        assert share < 0.05 if parks else share > 0.8
        assert machine.of_plain(width) > 0.9 * machine.best(width)


def test_a_few_slow_rounds_at_first_do_not_park_a_width_for_good():
    """A device may compile something in them."""
    crowd = CrowdCap(MOST, curves(free))
    for width in (8, 7):
        n_slow = 0
        while n_slow < 3:
            cap = crowd.cap(width)
            rounds = [made(cap, min(cap, 2))] * width
            crowd.observe(width, cap, rounds, plain(width) * (8 if cap else 1))
            n_slow += cap > 0
        machine = Machine(free, plain, accept=0.7, seed=width)
        for _ in range(400):
            machine.round(crowd, width)
        assert machine.of_plain(width) > 0.9 * machine.best(width) > 1.5


def test_a_hopeless_crowd_with_curves_is_hardly_ever_tried():
    crowd, machine = CrowdCap(MOST, curves(dear)), Machine(dear, plain, accept=0.3)
    for _ in range(100):  # as long as a short benchmark
        machine.round(crowd, 8)
    assert machine.of_plain(8) > 0.97 and sum(cap > 0 for cap in machine.caps) <= 3


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("verify_s", [free, dear])
@pytest.mark.parametrize("off", [None, 0.7, 1.0, 1.5])
def test_it_comes_near_the_best_cap_and_never_costs_much(accept, verify_s, off):
    for width in (2, 4, 8):
        crowd = CrowdCap(MOST, None if off is None else curves(verify_s, off))
        machine = Machine(verify_s, plain, accept, seed=width)
        for _ in range(2000):
            machine.round(crowd, width)
        assert machine.of_plain(width) > 0.97
        assert machine.of_plain(width) > (0.85 if off else 0.75) * machine.best(width)


def test_a_change_is_noticed():
    crowd, machine = CrowdCap(MOST, curves(free)), Machine(free, plain, accept=0.0)
    for n in range(6000):
        if n == 2000:
            machine.accept = 0.9
        machine.round(crowd, 4)
    assert sum(c > 0 for c in machine.caps[500:2000]) < 150
    assert sum(c > 0 for c in machine.caps[-1000:]) > 900
    machine.accept = 0.0
    for _ in range(1500):
        machine.round(crowd, 4)
    assert sum(c > 0 for c in machine.caps[-1000:]) < 150


def test_a_machine_that_gets_slow_for_blocks_parks():
    crowd, machine = CrowdCap(MOST, curves(free)), Machine(free, plain, accept=0.6)
    for _ in range(500):
        machine.round(crowd, 4)
    assert not crowd.parked(4)
    machine.verify_s = lambda width, block: 4 * free(width, block)
    for _ in range(300):
        machine.round(crowd, 4)
    assert crowd.parked(4)


def test_a_text_that_is_copied_does_not_hold_up_those_beside_it():
    """Together they would bring more tokens a second, and most requests would wait longer."""
    crowd, rng = CrowdCap(MOST, curves(dear)), random.Random(0)
    seconds, steps = 0.0, 2000
    for _ in range(steps):
        cap = crowd.cap(6)
        rounds = [made(cap, cap if row < 2 else 0) for row in range(6)]
        cost = (dear(6, 1 + cap) if cap else plain(6)) * rng.uniform(0.95, 1.05)
        crowd.observe(6, cap, rounds, cost)
        seconds += cost
    assert steps * plain(6) / seconds > 0.96  # of the others, which go on by one token a round


@pytest.mark.parametrize("first_s", [0.0, 0.02, 0.1])
def test_what_a_device_compiles_for_new_sizes_is_paid_from_an_allowance(first_s):
    crowd, rng, met = CrowdCap(31, curves(free)), random.Random(1), {}
    machine = Machine(free, plain, accept=0.5, noise=0.02)
    seconds = tokens = 0.0
    for i in range(12000):
        width = 2 + i // 16 % 7  # requests come and go
        cap = crowd.cap(width)
        n = [
            next((k for k in range(cap) if rng.random() > machine.accept), cap)
            for _ in range(width)
        ]
        cost = free(width, 1 + cap) if cap else plain(width)
        kind = (width, cap.bit_length())
        met[kind] = met.get(kind, 0) + 1
        if cap and met[kind] <= 3:
            cost += first_s
        crowd.observe(width, cap, [made(cap, k) for k in n], cost)
        seconds += cost / plain(width)
        tokens += sum(1 + k for k in n) / width
        if i == 600:
            assert tokens / seconds > (0.9 if first_s < 0.1 else 0.8)
    assert tokens / seconds > (1.3 if first_s < 0.1 else 1.05)


@pytest.mark.parametrize(("n_slow", "most"), [(1, 250), (3, 700)])
def test_slow_plain_rounds_at_first_do_not_let_drafts_that_never_pay_go_on(n_slow, most):
    crowd, machine = CrowdCap(MOST, curves(dear)), Machine(dear, plain, accept=0.7, seed=1)
    machine.plain_s = lambda width: plain(width) * (100 if len(machine.caps) < n_slow else 1)
    for _ in range(2000):
        machine.round(crowd, 8)
    assert sum(cap > 0 for cap in machine.caps) < most and not any(machine.caps[-500:])


def test_first_blocks_that_took_long_do_not_close_other_sizes_for_good():
    crowd = CrowdCap(MOST, curves(free))
    for width in (8, 3):
        machine = Machine(free, plain, accept=0.7, seed=width)
        machine.verify_s = lambda w, b, m=machine: (
            free(w, b) + 0.2 * (w == 8 and sum(cap > 0 for cap in m.caps) < 3)
        )
        for _ in range(6000):
            machine.round(crowd, width)
        assert sum(cap > 0 for cap in machine.caps[-500:]) > 450


def test_widths_are_apart_and_odd_figures_do_no_harm():
    crowd, machine = CrowdCap(MOST), Machine(free, plain, accept=0.9)
    for _ in range(50):
        machine.round(crowd, 2)
        crowd.observe(3, crowd.cap(3), [], 0.0)
    assert crowd.cap(3) == 0 and not crowd.parked(3) and not crowd.parked(9)
    assert not crowd.parked(2)
    assert CrowdCap(0).cap(4) == 0


class Never:
    """A crowd that never drafts, and counts what it is told."""

    def __init__(self):
        self.seen = []

    def cap(self, width):
        return 0

    def observe(self, width, cap, rounds, seconds):
        self.seen.append((width, cap, seconds))

    def saw(self, round_):
        pass


def test_a_parked_crowd_decodes_plainly_with_the_same_ids(folder):
    target, _ = load_target(folder)
    crowd = Never()
    batch = Batch(target, crowd=crowd)
    samplings = [Sampling(), Sampling(), Sampling(temperature=1.0, seed=5)]
    prompts = [[20 + i, 21, 22, 23] * 4 for i in range(3)]
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        pair = Pair(target, LookupDrafter(min_match=1))
        batch.add(pair, prompt, max_tokens=40, sampling=sampling, cap=FixedCap(4), tag=i)
    got, drafted = {0: [], 1: [], 2: []}, {0: 0, 1: 0, 2: 0}
    while batch.rows:
        shared = len(batch.rows) == 3 and batch.width == 3
        for row, round_ in batch.step():
            assert not isinstance(round_, Exception)
            got[row.tag] += round_.tokens
            drafted[row.tag] += round_.n_drafted if shared else 0
            if round_.finish_reason:
                batch.remove(row)
    for i in range(3):
        pair = Pair(target, LookupDrafter(min_match=1))
        rounds = generate(pair, prompts[i], max_tokens=40, sampling=samplings[i], cap=FixedCap(4))
        assert got[i] == [t for r in rounds for t in r.tokens]
    assert drafted[0] == drafted[1] == 0 and drafted[2] > 0  # its draws depend on its drafts
    assert crowd.seen and all(w in (2, 3) and not cap and s > 0 for w, cap, s in crowd.seen)


def test_drafters_that_take_their_turns_are_counted_and_a_faster_plain_step_is_noticed():
    """A verify that costs next to nothing, eight drafters, plain steps that become faster."""

    def verify_s(width, block):
        return 0.0075 + 0.00003 * width * block

    machine = Machine(lambda w, b: verify_s(w, b) + 0.006 * w, plain, accept=0.4, seed=1)
    for told, most in ((0.0, 60), (0.006, 10)):
        crowd = CrowdCap(32, curves(verify_s), lambda rows, cap, s=told: rows * s)
        machine.caps.clear()
        machine.plain_s = lambda width: 0.0094 if len(machine.caps) < 40 else 0.0053
        for _ in range(400):
            machine.round(crowd, 8)
        assert crowd.parked(8) and sum(cap > 0 for cap in machine.caps) <= most


def test_a_new_width_begins_with_what_its_neighbour_has_learnt():
    crowd, drafted = CrowdCap(MOST, curves(free, off=0.1)), {}
    for width in (8, 7):
        machine = Machine(free, plain, accept=0.0, seed=3)
        machine.verify_s = lambda w, b: 10 * free(w, b)
        for _ in range(100):
            machine.round(crowd, width)
        drafted[width] = sum(cap > 0 for cap in machine.caps)
    assert drafted[7] < drafted[8]


def test_a_width_learns_nothing_from_one_without_costs_of_its_own():
    """Such a width holds blocks against plain steps; the nearest that knows better is asked."""
    known = curves(free)
    crowd = CrowdCap(MOST, lambda rows: None if rows == 8 else known(rows))
    machine = Machine(free, plain, accept=1.0, noise=0.0)
    for width, slow in ((8, 3.0), (4, 1.0)):
        machine.verify_s = lambda w, b, slow=slow: slow * free(w, b)
        for _ in range(60):
            machine.round(crowd, width)
    crowd.cap(7)
    assert crowd._widths[8].drift.weight and crowd._widths[4].drift.weight
    assert crowd._widths[7].drift.mean == pytest.approx(crowd._widths[4].drift.mean)
    crowd.cap(1)  # nearest to 4, of which the same is known
    assert crowd._widths[1].drift.weight == 1.0


def test_costs_of_no_time_at_all_are_no_error():
    crowd = CrowdCap(MOST, lambda rows: Curve((1, 9), (0.0, 0.0)))
    machine = Machine(free, plain, accept=1.0)
    for _ in range(60):
        machine.round(crowd, 4)
    assert any(machine.caps)


class Kin(LookupDrafter):
    """Drafts with others of its kin."""

    kin = "all"

    def fork(self):
        return Kin()

    def draft_together(self, asks):
        return [None] * len(asks)


class Alone(Kin):
    """Is lent by turns."""

    fork = None  # as if it had no such member


DRAFTERS = [
    (LookupDrafter(), 5),
    (Kin(), 2),
    (Alone(), 5),
    (HybridDrafter(Kin()), 2),
    (HybridDrafter(Alone()), 5),
]


@pytest.mark.parametrize(("drafter", "rows"), DRAFTERS)
def test_the_engine_counts_what_the_drafter_was_measured_to_take(drafter, rows):
    """Five drafters in turn, or together, each more for a quarter."""
    draft = {"slow": Curve((1, 4), (0.002, 0.008))}
    level = Curve((1,), (0.01,))
    costs = Curves(((1, Curve((1, 8), (0.01, 0.02))),), level, draft=draft, max_draft=8)
    pair = Pair(ToyTarget(61), drafter)
    for make, want in ((lambda wish: CapController(costs), 0.006), (lambda wish: FixedCap(3), 0.0)):
        served = Served(pair, "m", "lookup", make, row_costs=lambda n: None)
        assert _crowd_of(served)._draft_s(5, 3) == pytest.approx(rows * want)


def test_nothing_is_measured_where_no_request_can_draft():
    pair = Pair(ToyTarget(vocab_size=12), ToyDrafter(vocab_size=12, max_draft=4))

    def asked(n_rows):
        raise AssertionError(f"the costs of {n_rows} rows")

    served = Served(pair, "m", "lookup", lambda wish: FixedCap(0), row_costs=asked)
    assert _crowd_of(served).cap(3) == 0
