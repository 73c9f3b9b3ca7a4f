"""What a race measures and what follows from it."""

import mlx.core as mx
import pytest

from spec_kernels import race
from spec_kernels.numerics import AttentionShape
from spec_kernels.race import RACED_KEYS, RACED_QUERIES, chain, min_keys, served, times


@pytest.mark.parametrize(
    ("measured", "speedups", "rows"),
    [
        ((1, 4, 8), (1.5, 1.5, 1.5), {1, 2, 3, 4, 5, 6, 7, 8}),
        ((1, 4, 8), (0.5, 1.5, 1.5), {4, 5, 6, 7, 8}),
        ((1, 4, 8), (1.5, 0.9, 1.5), {1, 8}),
        ((1, 4, 8), (1.01, 1.01, 1.01), set()),
    ],
)
def test_a_row_count_is_served_if_both_measured_neighbours_win(measured, speedups, rows):
    assert served(measured, speedups) == frozenset(rows)


def test_attention_is_served_from_the_length_where_it_wins_for_good():
    speedup = {f"{q}@{n}": 1.5 for q in (1, 2, 4, 8, 16) for n in RACED_KEYS}
    speedup |= {"1@2048": 0.9, "2@512": 0.8, "16@64": 0.7}
    found = min_keys(speedup, (1, 2, 4, 8, 16))
    assert found[1] == 8192
    assert found[2] == found[3] == 2048
    assert found[4] == found[8] == 1  # the shortest raced length stands for all below it
    assert found[16] == found[9] == 512


def test_a_race_of_attention_meets_every_length_once(monkeypatch):
    """As a growing text does: a backend may plan for each length, which one length would hide."""
    shapes = []

    def attend(q, k, v, *, scale, mask):
        shapes.append((q.shape[2], k.shape[2]))
        return q

    monkeypatch.setattr(race.mx.fast, "scaled_dot_product_attention", attend)

    class Kernel:
        def __init__(self, scale, where):
            pass

        def __call__(self, q, k, v, causal):
            return attend(q, k, v, scale=1.0, mask=None)

    monkeypatch.setattr(race, "RowAttention", Kernel)
    verdict = race.race_attention(AttentionShape(4, 2, 8, "float32"), "cuda")
    assert len(verdict.speedup) == len(RACED_KEYS) * len(RACED_QUERIES)
    assert len(set(shapes)) == len(shapes)
    for n in RACED_KEYS:
        near = {keys for _, keys in shapes if n <= keys < n + race._GROWTH}
        assert min(near) == n and len(near) == race._GROWTH


def test_a_chain_makes_every_input_wait_for_the_output_before_it():
    seen = []

    def step(value: mx.array, i: int) -> mx.array:
        seen.append(i)
        return value * 2

    out = chain(step, mx.ones((2, 3)), 4)()
    assert seen == [0, 1, 2, 3]
    assert mx.array_equal(out, mx.ones((2, 3)))


def test_times_runs_the_arms_in_turn_and_gives_medians():
    order = []
    arms = [lambda name=name: order.append(name) or mx.zeros(1) for name in "ab"]
    taken = times(arms, repeats=3)
    assert "".join(order) == "ab" + "ab" * 3
    assert len(taken) == 2 and all(seconds > 0 for seconds in taken)
