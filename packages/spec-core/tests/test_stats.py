import math
import time

import pytest

from spec_core import Pair, Round, StatsMeter, generate
from spec_core.testing import ScriptedDrafter, ToyTarget


def a_round(n_tokens=1, n_drafted=0, n_accepted=0, *, kind="verify", ties=0, reason=None) -> Round:
    return Round((1,) * n_tokens, "", kind, n_drafted, n_accepted, "toy", ties, 0.1, reason)


def figures(*rounds: Round):
    meter = StatsMeter()
    for round_ in rounds:
        meter.add(round_)
    return meter.result()


def test_without_rounds_there_is_no_gain_and_no_speed():
    stats = figures()
    assert (stats.n_tokens, stats.n_rounds, stats.n_drafted, stats.n_accepted) == (0, 0, 0, 0)
    assert (stats.acceptance_length, stats.acceptance_rate) == (1.0, 0.0)
    assert stats.accepted_by_position == ()
    assert (stats.tokens_per_second, stats.decode_s, stats.prefill_s) == (0.0, 0.0, 0.0)
    assert stats.finish_reason is None


def test_the_first_token_belongs_to_the_prefill():
    stats = figures(a_round(kind="prefill"))
    assert (stats.n_tokens, stats.n_rounds, stats.tokens_per_second) == (1, 0, 0.0)
    assert stats.prefill_s > 0
    assert stats.decode_s == 0


def test_plain_steps_have_an_acceptance_length_of_one():
    stats = figures(a_round(kind="prefill"), a_round(kind="plain"), a_round(kind="plain"))
    assert (stats.n_tokens, stats.n_rounds, stats.acceptance_length) == (3, 2, 1.0)


def test_acceptance_counts_drafts_by_position():
    stats = figures(
        a_round(kind="prefill"),
        a_round(3, 4, 2),  # 1 1 0 0
        a_round(1, 2, 0),  # 0 0
        a_round(5, 4, 4),  # 1 1 1 1
        a_round(kind="plain"),
    )
    assert stats.n_tokens == 11
    assert (stats.n_drafted, stats.n_accepted) == (10, 6)
    assert stats.acceptance_length == (3 + 1 + 5 + 1) / 4
    assert stats.acceptance_rate == 0.6
    assert stats.accepted_by_position == (2 / 3, 2 / 3, 1 / 2, 1 / 2)


def test_a_truncated_round_is_left_out_of_the_acceptance_length_alone():
    stats = figures(a_round(3, 4, 2), a_round(2, 4, 4, reason="stop"))
    assert stats.acceptance_length == 3.0
    assert stats.acceptance_rate == 6 / 8
    assert stats.n_tokens == 5
    assert stats.finish_reason == "stop"


def test_near_ties_add_up():
    assert figures(a_round(ties=2), a_round(ties=1)).near_ties == 3


def test_the_clock_runs_from_the_meter_to_the_last_round():
    meter = StatsMeter()
    time.sleep(0.02)
    meter.add(a_round(kind="prefill"))
    time.sleep(0.03)
    meter.add(a_round(3, 2, 2))
    time.sleep(0.02)
    stats = meter.result()
    assert stats.prefill_s >= 0.02
    assert stats.decode_s >= 0.03
    assert meter.result() == stats
    assert math.isclose(stats.tokens_per_second, 3 / stats.decode_s)


@pytest.mark.parametrize(("wrong_at", "length"), [((), 5.0), ((2,), 2.0)])
def test_a_generation_gives_the_figures_of_its_rounds(wrong_at, length):
    answer = [t for r in generate(Pair(ToyTarget()), [1, 2], max_tokens=21) for t in r.tokens]
    drafter = ScriptedDrafter(answer, 2, 12, 4, wrong_at)
    meter = StatsMeter()
    for round_ in generate(Pair(ToyTarget(), drafter), [1, 2], max_tokens=21):
        meter.add(round_)
    stats = meter.result()
    assert stats.n_tokens == 21
    assert stats.acceptance_length == length
    assert stats.finish_reason == "length"
