"""Verdicts: what is served, the key they are stored under, and what a failing kernel does."""

import json

import mlx.core as mx
import pytest

from spec_kernels import KernelError
from spec_kernels import gate as gate_module
from spec_kernels.gate import Gate
from spec_kernels.hardware import Device
from spec_kernels.numerics import AttentionShape, MatmulShape
from spec_kernels.race import AttentionVerdict, Verdict

DEVICE = Device("metal", "applegpu_g16s", "Apple M4 Max", "Darwin 26.1")
SHAPE = MatmulShape(64, 128, 4, 64, "bfloat16")
WON = Verdict(True, frozenset({5, 6, 7, 8}), 512, "raced", {"8": 1.4})


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


def test_known_verdicts_are_those_of_this_device_and_way_of_judging(tmp_path, monkeypatch):
    path = tmp_path / "verdicts.json"
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: WON)
    Gate(DEVICE, path).matmul(SHAPE)
    assert list(Gate(DEVICE, path).known()) == ["matmul 128->64 4-bit g64 bfloat16"]
    assert Gate(DEVICE, path, race=False).known() == {}
    assert Gate(Device("cuda", "sm_90", "H200", "Linux"), path).known() == {}


def test_a_large_head_is_tried_on_fewer_outputs(monkeypatch):
    tried = []
    monkeypatch.setattr(gate_module, "matmul_problem", lambda shape, where: tried.append(shape))
    Gate(DEVICE, race=False).matmul(MatmulShape(151936, 128, 4, 64, "bfloat16"))
    assert tried == [MatmulShape(16384, 128, 4, 64, "bfloat16")]


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


def test_what_another_process_is_writing_is_left_alone(tmp_path, monkeypatch):
    """Two that shared one name for a file in the making failed, or kept half of each."""
    path, others = tmp_path / "verdicts.json", tmp_path / "verdicts.tmp"
    others.write_text("half of ano")
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: WON)
    Gate(DEVICE, path).matmul(SHAPE)
    assert others.read_text() == "half of ano" and len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize(
    ("error", "n_tries"),
    [
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), 2),
        (RuntimeError("[malloc] Unable to allocate 7 bytes."), 2),
        (MemoryError(), 2),
        (RuntimeError("[metal] Unable to build the kernel"), 1),
        (KernelError("[x] no such shape"), 1),
    ],
)
def test_what_lacked_memory_is_tried_again_by_the_next_process(
    tmp_path, monkeypatch, error, n_tries
):
    tries = []

    def problem(*_):
        tries.append(_)
        raise error

    monkeypatch.setattr(gate_module, "matmul_problem", problem)
    for _ in range(2):
        found = Gate(DEVICE, tmp_path / "verdicts.json")
        assert not found.matmul(SHAPE).correct and found.matmul(SHAPE).reason.startswith("refused")
    assert len(tries) == n_tries


def test_a_kernel_that_cannot_run_is_a_verdict_not_a_crash():
    """This machine has no Metal: the launch is refused, and the shape stays stock."""
    if mx.metal.is_available():
        pytest.skip("needs a machine without Metal")
    verdict = Gate(DEVICE).matmul(SHAPE)
    assert not verdict.correct and not verdict.rows
    assert verdict.reason.startswith("refused: ")
    attention = Gate(DEVICE).attention(AttentionShape(8, 2, 64, "bfloat16"))
    assert not attention.correct and attention.min_keys == {}


def test_a_head_dimension_without_a_kernel_is_named():
    verdict = Gate(Device("cuda", "sm_90", "H200", "Linux")).attention(
        AttentionShape(8, 2, 256, "bfloat16")
    )
    assert verdict.reason == "head dimension 256, served are (64, 96, 128)"
    assert not verdict.correct and verdict.min_keys == {}


def test_a_wrong_kernel_is_not_raced(monkeypatch):
    monkeypatch.setattr(gate_module, "matmul_problem", lambda *a, **k: "error 1.0e+00")
    monkeypatch.setattr(gate_module, "race_matmul", lambda *a: pytest.fail("raced"))
    assert Gate(DEVICE).matmul(SHAPE) == Verdict(False, frozenset(), None, "error 1.0e+00")
