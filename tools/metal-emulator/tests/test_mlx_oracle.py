"""MLX's own shipped kernels through the emulator: if they come out right, the shim is right."""

import mlx.core as mx
import pytest
from metal_emulator import Options, last_report, metal_kernel

OPTIONS = Options(
    preamble="".join(
        f'#include "mlx/backend/metal/kernels/{name}.h"\n'
        for name in ("steel/gemm/loader", "steel/gemm/mma", "quantized_utils", "quantized")
    )
)
NAMES = ["w", "scales", "biases", "x", "dims"]
LANES = "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
ONE_ROW = f"qmv_fast_impl<T, GS, BITS, true>(w, scales, biases, x, y, dims[0], dims[1], {LANES});"
WIDE = (
    "qmv_wide_impl<T, GS, BITS, 5, 8>(w, scales, biases, x, y, dims[0], dims[1], dims[2], "
    f"{LANES});"
)
TILED = """
  constexpr int BK_padded = (32 + 16 / sizeof(T));
  threadgroup T Xs[32 * BK_padded];
  threadgroup T Ws[32 * BK_padded];
  qmm_t_impl<T, GS, BITS, false, T, 32, 32, 32>(
      w, scales, biases, x, y, Xs, Ws, dims[0], dims[1], dims[2], dims[0],
      threadgroup_position_in_grid, thread_index_in_threadgroup,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
# source, grid for 5 rows of 48 outputs, threadgroup
KERNELS = {
    "qmv_fast": (ONE_ROW, (160, 12, 1), (32, 2, 1)),
    "qmv_wide": (WIDE, (32, 12, 1), (32, 2, 1)),
    "qmm_t": (TILED, (64, 2, 2), (32, 2, 2)),
}
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 1.2e-2, mx.float16: 2e-3}
FEW = [("qmv_fast", 4, 64, mx.bfloat16), ("qmv_wide", 8, 64, mx.float16),
       ("qmm_t", 4, 64, mx.float32), ("qmm_t", 4, 32, mx.bfloat16)]  # fmt: skip
ALL = [
    (name, bits, group, dtype)
    for name in KERNELS
    for bits, group in ((4, 64), (8, 64), (2, 64), (3, 64), (5, 64), (6, 64), (4, 128), (4, 32))
    for dtype in TOLERANCE
]


def run(name: str, bits: int, group: int, dtype: mx.Dtype, options: Options) -> float:
    """Largest error of MLX's kernel against a float32 reference, relative to the largest value."""
    source, grid, threadgroup = KERNELS[name]
    rows, n, k = 5, 48, 1024 if bits == 2 else 512
    weight = (mx.random.normal((n, k), key=mx.random.key(bits)) * 0.05).astype(dtype)
    w, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    x = mx.random.normal((rows, k), key=mx.random.key(1)).astype(dtype)
    full = mx.dequantize(
        w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    want = x.astype(mx.float32) @ full.T
    (y,) = metal_kernel(f"mlx_{name}", NAMES, ["y"], source)(
        inputs=[w, scales, biases, x, mx.array([k, n, rows], dtype=mx.int32)],
        template=[("T", dtype), ("GS", group), ("BITS", bits)],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(rows, n)],
        output_dtypes=[dtype],
        options=options,
    )
    return (mx.abs(y.astype(mx.float32) - want).max() / mx.abs(want).max()).item()


@pytest.mark.parametrize(("name", "bits", "group", "dtype"), FEW, ids=str)
def test_a_shipped_kernel_comes_out_right(name, bits, group, dtype):
    assert run(name, bits, group, dtype, OPTIONS) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits", "group", "dtype"), ALL, ids=str)
def test_every_shipped_kernel_comes_out_right(name, bits, group, dtype):
    assert run(name, bits, group, dtype, OPTIONS) < TOLERANCE[dtype]


def test_a_shipped_kernel_passes_check_mode():
    options = Options(preamble=OPTIONS.preamble, check=True)
    assert run("qmm_t", 4, 64, mx.bfloat16, options) < TOLERANCE[mx.bfloat16]
    assert last_report().barriers > 0
