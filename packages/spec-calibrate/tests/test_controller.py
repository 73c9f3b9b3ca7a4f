from collections.abc import Callable
from dataclasses import replace

import pytest

from spec_calibrate import CapController, Curve, Curves
from spec_calibrate.scenarios import ROOMY, STEEP, steady
from spec_calibrate.simulate import Scenario, run
from spec_core import FixedCap, Pair, Round, generate
from spec_core.toys import ScriptedDrafter, ToyDrafter, ToyTarget

PROMPT = [3, 1, 4]


def _round(cap: int, n_accepted: int, elapsed_s: float, *, source: str = "dspark", **more) -> Round:
    fields = {
        "tokens": (0,) * (n_accepted + 1),
        "text": "",
        "kind": "verify" if cap else "plain",
        "n_drafted": cap,
        "n_accepted": n_accepted,
        "source": source if cap else "target",
        "near_ties": 0,
        "elapsed_s": elapsed_s,
        "finish_reason": None,
        "offset": 100,
        "cap": cap,
    }
    return Round(**(fields | more))


def _curves(row_s: float = 0.0001, draft_s: float = 0.001, max_draft: int = 4) -> Curves:
    widths = tuple(range(1, max_draft + 2))
    verify = Curve(widths, tuple(0.01 + row_s * (w - 1) for w in widths))
    return Curves(
        verify=((0, verify),),
        plain=Curve((0,), (0.0098,)),
        draft={"dspark": Curve((1,), (draft_s,))},
        overhead_s=0.0005,
        max_draft=max_draft,
    )


def _play(controller: CapController, n: int, accepted: Callable[[int], int]) -> list[int]:
    """Run rounds whose times are as the curves say; the caps that were used."""
    curves, caps = controller._curves, []
    for _ in range(n):
        cap = controller.next()
        caps.append(cap)
        controller.observe(_round(cap, accepted(cap), curves.round_s(cap, 100, "dspark")))
    return caps


def test_it_starts_with_the_cap_that_pays_best_at_typical_acceptance():
    assert CapController(_curves()).status.best_cap == 4
    assert CapController(_curves(row_s=0.01, draft_s=0.005)).status.best_cap == 0


def test_it_starts_from_the_acceptance_seen_while_calibrating():
    assert CapController(_curves(), acceptance=(0.05,)).status.best_cap == 0


def test_asking_for_the_cap_twice_changes_nothing():
    controller = CapController(_curves())
    assert controller.next() == controller.next()
    assert controller.status == controller.status


def test_it_parks_when_nothing_is_accepted_and_says_so():
    controller = CapController(_curves())
    caps = _play(controller, 300, lambda cap: 0)
    assert sum(cap > 0 for cap in caps[-200:]) <= 10
    while controller.status.cap:
        _play(controller, 1, lambda cap: 0)
    status = controller.status
    assert status.parked and status.expected_speedup == 1.0
    assert status.reason == "Parked: no cap is expected to beat plain decoding."


def test_trials_of_a_hopeless_drafter_become_rarer():
    controller = CapController(_curves())
    caps = _play(controller, 4000, lambda cap: 0)
    early, late = caps[:1000], caps[3000:]
    assert 0 < sum(cap > 0 for cap in late) <= sum(cap > 0 for cap in early)


def test_it_comes_back_when_drafts_are_accepted_again():
    controller = CapController(_curves())
    _play(controller, 300, lambda cap: 0)
    caps = _play(controller, 400, lambda cap: cap)
    assert caps[-50:].count(4) >= 40


def test_it_takes_the_full_cap_when_all_is_accepted():
    controller = CapController(_curves())
    caps = _play(controller, 100, lambda cap: cap)
    assert caps[-20:].count(4) >= 16
    status = controller.status
    assert not status.parked and status.expected_speedup > 3
    assert len(status.acceptance) == 4 and min(status.acceptance) > 0.85


def test_it_stops_at_the_position_where_drafts_begin_to_fail():
    controller = CapController(_curves(row_s=0.001))
    caps = _play(controller, 200, lambda cap: min(cap, 2))
    assert caps[-30:].count(2) >= 22


def test_rounds_slower_than_measured_make_it_park():
    controller = CapController(_curves())
    controller.observe(_round(0, 0, 0.0, kind="prefill"))
    caps = []
    for _ in range(300):
        cap = controller.next()
        caps.append(cap)
        seconds = 0.0098 if cap == 0 else 0.05
        controller.observe(_round(cap, min(cap, 2), seconds))
    assert caps[-100:].count(0) >= 95


def test_a_plain_step_is_measured_again_now_and_then():
    controller = CapController(_curves())
    caps = _play(controller, 1000, lambda cap: cap)
    assert 2 <= caps.count(0) <= 30


def test_the_verify_gets_narrower_in_a_deep_context():
    widths = tuple(range(1, 6))
    deep = Curve(widths, tuple(0.01 * w for w in widths))
    curves = Curves(
        verify=((0, Curve(widths, (0.01,) * 5)), (1000, deep)),
        plain=Curve((0,), (0.01,)),
        max_draft=4,
    )
    controller = CapController(curves, acceptance=(0.8,))
    assert controller.status.best_cap == 4
    controller.observe(_round(0, 0, 0.0, kind="prefill", offset=1000))
    assert controller.status.best_cap == 0


def test_a_source_that_is_free_is_used_where_a_dear_one_is_not():
    """Both are right half the time; only the dear one costs more than it brings."""
    curves = _curves(draft_s=0.02)
    assert CapController(curves, acceptance=(0.5,)).status.best_cap == 0
    controller = CapController(curves, acceptance=(0.5,))
    for n in range(60):
        controller.observe(_round(4, 4 * (n % 2), 0.0109, source="lookup"))
    assert controller.status.best_cap > 0


def test_the_cap_follows_the_source_that_usually_comes_next():
    """Drafts by lookup are all accepted, those by the head hardly ever; each comes in runs."""
    controller = CapController(_curves(row_s=0.002))
    for _ in range(6):
        for source, n_accepted in (("lookup", 4), ("dspark", 0)):
            for _ in range(40):
                cap = max(1, controller.next())
                seconds = controller._curves.round_s(cap, 100, source)
                controller.observe(_round(cap, min(cap, n_accepted), seconds, source=source))
    controller.observe(_round(4, 4, 0.018, source="lookup"))
    assert controller.status.best_cap == 4
    controller.observe(_round(4, 0, 0.0195))
    assert controller.status.best_cap <= 1


def test_a_head_with_a_short_block_is_not_charged_for_drafts_it_never_gives():
    curves = _curves(row_s=0.004, max_draft=16)
    assert CapController(replace(curves, blocks={"dspark": 2})).status.best_cap <= 2
    flat = replace(_curves(max_draft=16), blocks={"dspark": 3})
    assert CapController(flat, acceptance=(0.9,)).status.best_cap == 3


def test_a_calibrated_confidence_steers_the_estimate():
    """Same outcomes, accepted in turns; the drafter says how likely each was."""

    def rate(curves: Curves) -> float:
        controller = CapController(curves)
        for n in range(40):
            controller.observe(_round(1, n % 2, 0.011, confidence=(0.9,)))
        return controller.status.acceptance[0]

    assert rate(_curves()) == pytest.approx(0.5, abs=0.08)  # without temperatures it is not heard
    trusted = rate(replace(_curves(), temperatures=(1.0,)))
    tempered = rate(replace(_curves(), temperatures=(20.0,)))
    assert trusted > 0.65 > tempered


def test_a_draft_shorter_than_the_cap_at_the_end_of_a_text_is_no_miss():
    controller = CapController(_curves())
    for _ in range(50):
        controller.observe(_round(4, 4, 0.012))
        controller.observe(_round(1, 1, 0.011))  # the loop asked for one: one token was left
    assert controller.next() == 4


def test_costs_learnt_in_one_sequence_serve_the_next():
    controller = CapController(_curves())
    for _ in range(40):
        controller.observe(_round(0, 0, 0.0098))
        controller.observe(_round(4, 1, 0.1))
    controller.observe(_round(0, 0, 0.0, kind="prefill"))
    assert controller.next() < 4


def test_without_drafts_it_decodes_plainly():
    controller = CapController(_curves(), max_draft=0)
    _play(controller, 5, lambda cap: 0)
    assert controller.next() == 0
    assert controller.status.reason == "There is no drafter."


def test_the_largest_cap_is_never_exceeded():
    controller = CapController(_curves(max_draft=8), max_draft=3)
    assert max(_play(controller, 200, lambda cap: cap)) == 3


def test_a_negative_largest_cap_is_refused():
    with pytest.raises(ValueError, match="max_draft must be >= 0, got -1"):
        CapController(_curves(), max_draft=-1)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_pinned_cap_stays(n: int):
    """Whatever rounds show, the fixed cap that a user set is used in every round."""
    outcome = run(Scenario("hostile", STEEP, steady(0.0), n_tokens=200), FixedCap(n))
    assert set(outcome.caps[:-5]) == {n}


def test_the_real_loop_emits_the_tokens_of_plain_decoding():
    plain = [t for r in generate(Pair(ToyTarget()), PROMPT, max_tokens=120) for t in r.tokens]
    controller = CapController(ROOMY.curves(4))
    rounds = list(generate(Pair(ToyTarget(), ToyDrafter()), PROMPT, max_tokens=120, cap=controller))
    assert [t for r in rounds for t in r.tokens] == plain


def test_the_real_loop_uses_drafts_that_are_right():
    """The curves are of a machine with 10 ms steps, so the toy's times are all 'faster'."""
    plain = [t for r in generate(Pair(ToyTarget()), PROMPT, max_tokens=120) for t in r.tokens]
    drafter = ScriptedDrafter(plain, len(PROMPT), vocab_size=12)
    controller = CapController(ROOMY.curves(8), acceptance=(0.9,))
    rounds = list(generate(Pair(ToyTarget(), drafter), PROMPT, max_tokens=120, cap=controller))
    assert [t for r in rounds for t in r.tokens] == plain
    assert sum(r.n_accepted for r in rounds) > 60


def test_assumed_rates_that_are_no_shares_are_refused():
    with pytest.raises(ValueError, match=r"Acceptance rates must be in 0\.\.1, got \(0\.5, 5\.0\)"):
        CapController(_curves(), acceptance=(0.5, 5.0))
