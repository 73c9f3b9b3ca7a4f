from collections.abc import Sequence
from dataclasses import replace

import pytest

from spec_calibrate.scenarios import KNEE, ROOMY, copies, steady
from spec_calibrate.simulate import Scenario, judge, run
from spec_core import FixedCap, Pair, Round, generate
from spec_core.toys import ScriptedDrafter, ToyTarget

EXACT = {"noise": 0.0, "curve_error": 0.0}


class _Recorder:
    """A cap that plays a script by rounds seen, and writes down every call."""

    def __init__(self, caps: Sequence[int]) -> None:
        self.caps = list(caps)
        self.calls: list[object] = []
        self._n_seen = 0

    def next(self) -> int:
        self.calls.append("next")
        return self.caps[self._n_seen % len(self.caps)]

    def observe(self, round_: Round) -> None:
        self._n_seen += 1
        figures = (round_.kind, round_.cap, round_.n_drafted, round_.n_accepted, len(round_.tokens))
        self.calls.append((*figures, round_.source == "target", round_.finish_reason))


@pytest.mark.parametrize("caps", [[0], [3], [0, 0, 0, 2, 2, 0, 4, 0], [1, 0]])
def test_caps_are_called_in_the_order_of_the_real_loop(caps: list[int]):
    n_tokens, prompt = 40, [3, 1, 4]
    plain = generate(Pair(ToyTarget()), prompt, max_tokens=n_tokens)
    answer = [token for round_ in plain for token in round_.tokens]
    drafter = ScriptedDrafter(answer + [0] * 8, len(prompt), vocab_size=12, wrong_at=(3,))
    real = _Recorder(caps)
    list(generate(Pair(ToyTarget(), drafter), prompt, max_tokens=n_tokens, cap=real))
    scripted = _Recorder(caps)
    run(Scenario("wrong at 3", ROOMY, steady(1.0, 1.0, 0.0), n_tokens=n_tokens), scripted)
    assert scripted.calls == real.calls


def test_a_plain_run_takes_the_time_of_its_steps():
    scenario = Scenario("plain", ROOMY, steady(0.5), n_tokens=101, **EXACT)
    assert run(scenario, FixedCap(0)).seconds == pytest.approx(
        100 * ROOMY.plain_s + ROOMY.overhead_s
    )


def test_a_perfect_drafter_takes_the_time_of_full_blocks():
    scenario = Scenario("perfect", ROOMY, steady(1.0), n_tokens=101, **EXACT)
    seconds = ROOMY.draft_s(4) + ROOMY.verify_s(5) + ROOMY.overhead_s
    outcome = run(scenario, FixedCap(4))
    assert outcome.caps == (4,) * 20
    assert outcome.seconds == pytest.approx(20 * seconds)


def test_acceptance_comes_out_at_the_rate_that_was_asked_for():
    scenario = Scenario("half", ROOMY, steady(0.5), n_tokens=20_000, **EXACT)
    n_rounds = len(run(scenario, FixedCap(3)).caps)
    assert 20_000 / n_rounds == pytest.approx(1 + 0.5 + 0.25 + 0.125, rel=0.02)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    scenario = Scenario("half", KNEE, steady(0.5))
    assert run(scenario, FixedCap(3), 5) == run(scenario, FixedCap(3), 5)
    assert run(scenario, FixedCap(3), 5) != run(scenario, FixedCap(3), 6)


def test_a_drafter_without_drafts_costs_a_step_that_is_not_pipelined():
    scenario = Scenario("misses", ROOMY, steady(1.0), 101, offers=lambda place: 0, **EXACT)
    seconds = ROOMY.draft_s(4) + ROOMY.verify_s(1) + ROOMY.overhead_s
    assert run(scenario, FixedCap(4)).seconds == pytest.approx(100 * seconds, rel=0.01)


def test_copies_offer_what_is_left_of_the_run():
    offers = copies(every=3, length=2)
    assert [offers(place) for place in range(7)] == [0, 0, 0, 2, 1, 0, 0]


def test_drift_and_depth_lengthen_rounds():
    scenario = Scenario("half", KNEE, steady(0.5), **EXACT)
    hot = replace(scenario, drift=lambda done, width: 2.0)
    deep = replace(scenario, machine=replace(KNEE, depth_s=1e-6), depth=1000)
    base = run(scenario, FixedCap(2)).seconds
    assert run(hot, FixedCap(2)).seconds == pytest.approx(2 * base)
    assert run(deep, FixedCap(2)).seconds > 1.1 * base


def test_the_verdict_on_a_fixed_cap_is_its_own_share():
    scenario = Scenario("good", KNEE, steady(0.8), n_tokens=400)
    verdict = judge(scenario, lambda curves: FixedCap(2), seeds=range(2))
    assert verdict.rate == verdict.fixed[2]
    assert verdict.of_best == verdict.fixed[2] / max(verdict.fixed)
    assert verdict.fixed[verdict.best_fixed] == max(verdict.fixed)
    assert verdict.of_plain == verdict.fixed[2] / verdict.fixed[0]


def test_curves_of_a_machine_give_its_costs_back():
    curves = KNEE.curves(8)
    for cap in range(1, 9):
        expected = KNEE.draft_s(cap) + KNEE.verify_s(cap + 1) + KNEE.overhead_s
        assert curves.round_s(cap, 0, "scripted") == pytest.approx(expected)
