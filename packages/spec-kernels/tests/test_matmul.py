"""The few-row matmul: reference, plans, dispatcher; the Metal kernel in the emulator."""

import functools

import metal_emulator
import mlx.core as mx
import pytest
from metal_emulator import Options, last_report

from spec_kernels import KernelError, Weight, verify_matmul, verify_matmul_metal, verify_matmul_ops
from spec_kernels.matmul import (
    BITS,
    GROUPS,
    Plan,
    RowMatmul,
    cuda_plan,
    metal_plan,
    unsupported,
)
from spec_kernels.numerics import MatmulShape, matmul_problem, random_weight, relative_error

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
SMALL = Plan(tiles=2, splits=2)
# Every width once, every group once, every dtype: the full product is marked slow.
FEW = [(2, 128, "bfloat16"), (3, 32, "float16"), (4, 64, "bfloat16"), (4, 64, "float32"),
       (5, 64, "bfloat16"), (6, 128, "float16"), (8, 32, "float32")]  # fmt: skip
ALL = [(b, g, d) for b in BITS for g in GROUPS for d in TOLERANCE]

plain = functools.partial(metal_emulator.metal_kernel)
checked = functools.partial(metal_emulator.metal_kernel, options=Options(check=True))


def inputs(rows: int, weight: Weight) -> mx.array:
    return mx.random.normal((rows, weight.k), key=mx.random.key(rows)).astype(weight.dtype)


@pytest.mark.parametrize(("bits", "group", "dtype"), FEW, ids=str)
def test_the_metal_kernel_passes_its_own_gate_in_the_emulator(emulator, bits, group, dtype):
    """Ragged N, plain, negative and outlying data, poisoned outputs, 16 to 1 rows, row by row."""
    shape = MatmulShape(37, 384, bits, group, dtype)
    assert matmul_problem(shape, "metal", plan=SMALL, factory=plain) is None


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "dtype"), ALL, ids=str)
def test_every_width_group_and_dtype_passes(emulator, bits, group, dtype):
    shape = MatmulShape(37, 384, bits, group, dtype)
    assert matmul_problem(shape, "metal", plan=SMALL, factory=plain) is None


def test_every_row_count_is_within_tolerance_and_has_the_rows_own_bits(emulator):
    weight = random_weight(MatmulShape(40, 256, 4, 64, "bfloat16"))
    matmul = RowMatmul(weight, "metal", plan=SMALL, factory=plain)
    x = inputs(16, weight)
    full = matmul(x)
    want = verify_matmul_ops(x.astype(mx.float32), weight)
    assert relative_error(full, want) < 5e-3
    for rows in range(1, 17):
        assert mx.array_equal(matmul(x[:rows]), full[:rows]), rows
        assert mx.array_equal(matmul(x[16 - rows :]), full[16 - rows :]), rows


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_packed_weights_are_requested_once_whatever_the_rows(emulator, rows):
    weight = random_weight(MatmulShape(64, 256, 4, 64, "bfloat16"))
    x = inputs(rows, weight)
    verify_matmul_metal(x, weight, plan=SMALL, factory=checked)
    report = last_report()
    assert report.traffic["w"] == (weight.w.nbytes, 0)
    assert report.traffic["y"] == (0, rows * 64 * 2)
    tiles = 1 if rows <= 8 else 2
    assert report.threadgroup_bytes == SMALL.splits * SMALL.tiles * tiles * 64 * 4
    assert report.barriers == report.threadgroups == 4


def test_the_order_of_threadgroups_and_lanes_changes_no_bit(emulator):
    weight = random_weight(MatmulShape(40, 256, 4, 64, "bfloat16"))
    x = inputs(9, weight)
    orders = [
        functools.partial(metal_emulator.metal_kernel, options=Options(order=order, seed=9))
        for order in (0, 1, 2)
    ]
    first, *others = [verify_matmul_metal(x, weight, plan=SMALL, factory=f) for f in orders]
    assert all(mx.array_equal(first, other) for other in others)


def test_a_planted_error_in_the_kernel_does_not_pass_the_gate(emulator, monkeypatch):
    def wrong(**arguments):
        arguments["source"] = arguments["source"].replace("fma(bias,", "fma(-bias,")
        return metal_emulator.metal_kernel(**arguments)

    shape = MatmulShape(37, 384, 4, 64, "bfloat16")
    problem = matmul_problem(shape, "metal", plan=SMALL, factory=wrong)
    assert problem is not None and "error" in problem


def test_an_output_left_out_does_not_pass_the_gate(emulator):
    def lazy(**arguments):
        arguments["source"] = arguments["source"].replace("n < N) y[", "n < N - 1) y[")
        return metal_emulator.metal_kernel(**arguments)

    shape = MatmulShape(37, 384, 4, 64, "bfloat16")
    assert "error nan" in str(matmul_problem(shape, "metal", plan=SMALL, factory=lazy))


def test_a_kernel_whose_rows_depend_on_each_other_does_not_pass_the_gate(emulator):
    def leaky(**arguments):
        arguments["source"] = arguments["source"].replace(
            "float v = 0.0f;", "float v = 1.0e-3f * float(M) * sums[i];"
        )
        return metal_emulator.metal_kernel(**arguments)

    shape = MatmulShape(37, 384, 4, 64, "float16")
    problem = matmul_problem(shape, "metal", plan=SMALL, factory=leaky)
    assert problem is not None


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_reference_equals_stock_mlx_in_float32(bits):
    weight = random_weight(MatmulShape(24, 128, bits, 64, "float32"))
    x = inputs(5, weight)
    got, choice = verify_matmul(x, weight, kernel="ops")
    stock, _ = verify_matmul(x, weight, kernel="stock")
    assert choice == ("ops", "asked for")
    assert mx.allclose(got, stock, rtol=1e-5, atol=1e-6)


def test_the_dispatcher_reports_stock_on_a_cpu():
    weight = random_weight(MatmulShape(24, 128, 4, 64, "float32"))
    _, choice = verify_matmul(inputs(3, weight), weight)
    assert choice == ("stock", "no kernel for the CPU")


def test_leading_axes_are_kept(emulator):
    weight = random_weight(MatmulShape(24, 128, 4, 64, "bfloat16"))
    x = inputs(6, weight).reshape(1, 6, 128)
    y = verify_matmul_metal(x, weight, plan=SMALL, factory=plain)
    assert y.shape == (1, 6, 24)


def test_more_than_sixteen_rows_are_refused():
    weight = random_weight(MatmulShape(24, 128, 4, 64, "bfloat16"))
    with pytest.raises(
        KernelError, match=r"x must be 1 to 16 rows of 128 .* got shape \(17, 128\)"
    ):
        RowMatmul(weight, "metal")(mx.zeros((17, 128), mx.bfloat16))


@pytest.mark.parametrize(
    ("weight", "where", "reason"),
    [
        (Weight(mx.zeros((2, 8, 8)), None, None, 64, 16), "cuda", "weight must be a matrix"),
        (Weight(mx.zeros((8, 64)), None, None, 64, 16), "metal", "bits must be one of"),
        (Weight(mx.zeros((8, 64)), None, None, 64, 16), "cuda", "dtype"),
        (Weight(mx.zeros((8, 40), mx.float16), None, None, 64, 16), "cuda", "multiple of a group"),
        (Weight(mx.zeros((8, 8), mx.uint32), mx.zeros((8, 2)), None, 32, 4), "metal", "affine"),
    ],
)
def test_what_a_kernel_cannot_take_is_named(weight, where, reason):
    assert reason in str(unsupported(weight, where))
    with pytest.raises(KernelError, match=r"\[verify_matmul\] .* Use stock MLX\."):
        RowMatmul(weight, where)


@pytest.mark.parametrize(
    ("k", "group"),
    [(k, g) for k in (576, 1536, 2560, 4096, 9728, 12288) for g in GROUPS if k % g == 0],
)
@pytest.mark.parametrize("bits", [*BITS, 16])
def test_a_cuda_plan_divides_k_and_fits_a_multiprocessor(bits, group, k):
    plan = cuda_plan(4096, k, bits, group)
    assert (k // group) % plan.slab == 0
    assert 1 <= plan.splits <= min(16, k // group // plan.slab)
    assert plan.splits * plan.tiles * 16 * 17 * 4 <= 48 * 1024


@pytest.mark.parametrize("n", [64, 576, 1024, 4096, 151936])
def test_a_metal_plan_fits_threadgroup_memory_and_the_smallest_gpus(n):
    plan = metal_plan(n, 4096, 64)
    assert plan.splits * 32 <= 256
    assert plan.splits * plan.tiles * 2 * 64 * 4 <= 32768
