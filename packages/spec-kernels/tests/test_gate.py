"""Verdicts: what is served, the key they are stored under, and what a failing kernel does."""

import json

import mlx.core as mx
import pytest

from spec_kernels import gate as gate_module
from spec_kernels.gate import (
    AttentionShape,
    AttentionVerdict,
    Gate,
    MatmulShape,
    Verdict,
    chain,
    min_keys,
    random_weight,
    relative_error,
    served,
    times,
)
from spec_kernels.hardware import Device

DEVICE = Device("metal", "applegpu_g16s", "Apple M4 Max", "Darwin 26.1")
SHAPE = MatmulShape(64, 128, 4, 64, "bfloat16")
WON = Verdict(True, frozenset({5, 6, 7, 8}), 512, "raced", {"8": 1.4})


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


def test_a_verdict_survives_the_process_under_the_same_key_only(tmp_path, monkeypatch):
    path = tmp_path / "verdicts.json"
    measured = []
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: measured.append(shape) or WON)
    assert Gate(DEVICE, path).matmul(SHAPE) == WON
    assert Gate(DEVICE, path).matmul(SHAPE) == WON
    assert len(measured) == 1
    newer = Device("metal", "applegpu_g16s", "Apple M4 Max", "Darwin 26.2")
    Gate(newer, path).matmul(SHAPE)
    Gate(DEVICE, path, race=False).matmul(SHAPE)
    Gate(DEVICE, path).matmul(MatmulShape(64, 128, 8, 64, "bfloat16"))
    assert len(measured) == 4
    keys = list(json.loads(path.read_text()))
    assert all("matmul 128->64" in key for key in keys)


def test_an_attention_verdict_survives_with_its_numbers_as_numbers(tmp_path, monkeypatch):
    verdict = AttentionVerdict(True, {1: 512, 8: 2048}, "raced", {"8@2048": 1.2})
    monkeypatch.setattr(Gate, "_measure_attention", lambda self, shape: verdict)
    shape = AttentionShape(32, 8, 128, "bfloat16")
    path = tmp_path / "verdicts.json"
    Gate(DEVICE, path).attention(shape)
    monkeypatch.setattr(Gate, "_measure_attention", lambda self, shape: None)
    assert Gate(DEVICE, path).attention(shape) == verdict


def test_a_damaged_file_costs_a_measurement_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "verdicts.json"
    path.write_text("{")
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: WON)
    assert Gate(DEVICE, path).matmul(SHAPE) == WON


def test_a_kernel_that_cannot_run_is_a_verdict_not_a_crash():
    """This machine has no Metal: the launch is refused, and the shape stays stock."""
    if mx.metal.is_available():
        pytest.skip("needs a machine without Metal")
    verdict = Gate(DEVICE).matmul(SHAPE)
    assert not verdict.correct and not verdict.rows
    assert verdict.reason.startswith("refused: ")
    attention = Gate(DEVICE).attention(AttentionShape(8, 2, 64, "bfloat16"))
    assert not attention.correct and attention.min_keys == {}


def test_a_wrong_kernel_is_not_raced(monkeypatch):
    monkeypatch.setattr(gate_module, "matmul_problem", lambda *a, **k: "error 1.0e+00")
    monkeypatch.setattr(gate_module, "race_matmul", lambda *a: pytest.fail("raced"))
    assert Gate(DEVICE).matmul(SHAPE) == Verdict(False, frozenset(), None, "error 1.0e+00")


def test_random_weights_are_of_the_kind_asked_for():
    negative = random_weight(MatmulShape(32, 128, 4, 64, "float32"), "negative")
    assert negative.scales is not None and mx.all(negative.scales < 0)
    outliers = random_weight(MatmulShape(32, 128, 16, 64, "float32"), "outliers")
    assert mx.abs(outliers.w).max() > 20 * mx.abs(outliers.w[:, 1:61]).max()


def test_relative_error_is_nan_if_any_value_is():
    assert relative_error(mx.array([1.0, float("nan")]), mx.array([1.0, 2.0])) != 0
    assert str(relative_error(mx.array([float("nan")]), mx.array([2.0]))) == "nan"
    assert relative_error(mx.array([1.0, 4.0]), mx.array([1.0, 5.0])) == pytest.approx(0.2)


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
