"""The race of whole forwards: who runs when, and what its figures mean."""

from spec_kernels import whole
from spec_kernels.race import raced_rows
from spec_kernels.whole import ARMS, best_arms, race_forwards


def test_every_arm_runs_in_turn_after_a_warm_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(whole.time, "perf_counter", lambda: now[0])
    arms = []

    def forward(rows):
        slow = {"stock": 3.0, "raced": 2.0, "all": 1.0}[arms[-1]] * rows
        now[0] += slow + (100.0 if len(arms) <= len(ARMS) else 0.0)  # the first of each compiles

    found = race_forwards(forward, arms.append, raced_rows(16), repeats=3)
    assert list(found) == [1, 2, 4, 6, 8, 9, 12, 16]
    assert found[1] == {"stock": 3.0, "raced": 2.0, "all": 1.0}
    assert found[16] == {"stock": 48.0, "raced": 32.0, "all": 16.0}
    assert arms[:6] == list(ARMS) * 2


def test_stock_stays_where_the_gain_is_within_the_noise():
    arms = best_arms({1: {"stock": 1.0, "raced": 1.0, "all": 0.99}, 16: dict.fromkeys(ARMS, 1.0)})
    assert set(arms) == {"stock"} and len(arms) == 17


def test_between_two_measured_counts_both_must_win():
    won = {"stock": 2.0, "raced": 1.5, "all": 1.0}
    lost = {"stock": 1.0, "raced": 1.5, "all": 2.0}
    arms = best_arms({1: lost, 4: won, 8: won, 16: lost})
    assert arms[:4] == ("stock",) * 4
    assert arms[4:9] == ("all",) * 5
    assert arms[9:] == ("stock",) * 8
