"""The sweep that a person runs on a device, here on the CPU and on emulated Metal."""

import metal_emulator
import mlx.core as mx
import pytest

from spec_kernels import probe as probe_module
from spec_kernels.matmul import BITS, GROUPS
from spec_kernels.probe import Probe, attention_shapes, matmul_shapes, probes


def by_name(found):
    return {probe.name: probe for probe in found}


def test_on_a_cpu_the_references_are_tried_and_the_kernels_skipped():
    found = by_name(probes("cpu"))
    assert found["kernels"] == Probe("kernels", "skip", "no kernels on this backend", 0.0)
    assert [p for p in found.values() if p.outcome == "fail"] == []
    assert {"verify_matmul_ops", "wide_prefill_ops", "row_attention_ops"} <= {
        name.split()[0] for name in found
    }


def test_every_bits_group_and_head_dimension_has_its_probe():
    for where in ("metal", "cuda"):
        shapes = matmul_shapes(where)
        assert {(s.bits, s.group_size) for s in shapes} >= {(b, g) for b in BITS for g in GROUPS}
        assert len(set(shapes)) == len(shapes)
    assert {s.depth for s in attention_shapes()} == {64, 80, 96, 128}


@pytest.mark.slow
def test_every_metal_kernel_passes_under_emulation(emulator):
    found = list(probes("metal", race=False, factory=metal_emulator.metal_kernel))
    assert len([p for p in found if p.name.startswith("matmul ")]) == len(matmul_shapes("metal"))
    assert [p for p in found if p.outcome != "pass"] == []


def test_a_wrong_reference_fails_with_its_error(monkeypatch):
    ops = probe_module.verify_matmul_ops

    def wrong(x, weight):
        return ops(x, weight) * 1.02

    monkeypatch.setattr(probe_module, "verify_matmul_ops", wrong)
    failed = [p for p in probes("cpu") if p.outcome == "fail"]
    assert len(failed) >= 6
    assert all("error 2." in p.detail and "is right" in p.detail for p in failed[:6])
    monkeypatch.undo()
    attend = probe_module.row_attention_ops

    def unmasked(q, k, v, *, scale, mask):
        return attend(q, k, v, scale=scale, mask=None)

    monkeypatch.setattr(probe_module, "row_attention_ops", unmasked)
    failed = [p.name for p in probes("cpu") if p.outcome == "fail"]
    assert len(failed) == 2 and all("row_attention_ops" in name for name in failed)


def test_a_kernel_that_does_not_compile_or_computes_wrong_is_a_failure_not_an_error(monkeypatch):
    def broken(**_):
        def kernel(**_):
            raise RuntimeError("error: unknown type name 'bfloat'\nmore lines")

        return kernel

    one = [probe_module.MatmulShape(64, 128, 4, 64, "bfloat16")]
    monkeypatch.setattr(probe_module, "matmul_shapes", lambda where: one)
    found = by_name(probes("metal", race=False, factory=broken))
    for name in ("matmul 128->64 4-bit g64 bfloat16", "attention 8/2x64 bfloat16"):
        assert found[name].outcome == "fail"
        assert found[name].detail == "RuntimeError: error: unknown type name 'bfloat'"

    def zeros(**_):
        def kernel(*, output_shapes, output_dtypes, **_):
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return kernel

    found = by_name(probes("metal", race=False, factory=zeros))
    wrong = found["matmul 128->64 4-bit g64 bfloat16"]
    assert wrong.outcome == "fail" and wrong.detail.startswith("error 1.0e+00 on plain data")


def test_a_head_dimension_that_a_backend_lacks_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(probe_module, "matmul_shapes", lambda where: [])
    monkeypatch.setattr(probe_module, "attention_problem", lambda shape, where: None)
    monkeypatch.setattr(probe_module, "_shared", lambda where: None)
    found = by_name(probes("cuda", race=False))
    assert found["attention 8/2x80 bfloat16"].outcome == "skip"
    assert found["attention 8/2x80 bfloat16"].detail == (
        "head dimension 80, served are (64, 96, 128)"
    )
    assert found["attention 8/2x96 bfloat16"].outcome == "pass"


def test_races_report_their_ratios_and_a_race_that_breaks_is_a_failure(monkeypatch):
    monkeypatch.setattr(probe_module, "matmul_shapes", lambda where: [])
    monkeypatch.setattr(probe_module, "attention_shapes", lambda: [])

    class Raced:
        speedup = {"1": 1.234, "8": 2.0}

    def broken(shape, where):
        raise RuntimeError("")

    monkeypatch.setattr(probe_module, "race_matmul", lambda shape, where: Raced)
    monkeypatch.setattr(probe_module, "race_attention", broken)
    found = by_name(probes("metal"))
    raced = found["race matmul 4096->4096 4-bit g64 bfloat16"]
    assert (raced.outcome, raced.detail) == ("pass", "times stock MLX: 1 1.23, 8 2.00")
    assert found["race attention 32/8x128 bfloat16"].detail == "RuntimeError: no message"
