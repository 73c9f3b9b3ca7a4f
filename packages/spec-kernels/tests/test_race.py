"""What a race measures and what follows from it."""

import mlx.core as mx
import pytest

from spec_kernels.race import chain, min_keys, served, times


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
    speedup = {f"{q}@{n}": 1.5 for q in (1, 2, 4, 8, 16) for n in (512, 2048, 8192)}
    speedup |= {"1@2048": 0.9, "2@512": 0.8}
    found = min_keys(speedup)
    assert found[1] == 8192
    assert found[2] == 2048
    assert found[4] == found[16] == 512
    assert found[3] == 2048


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
