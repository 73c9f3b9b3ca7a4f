"""Small kernels whose results are known: elementwise, reductions, barriers, strides, orders."""

import mlx.core as mx
import numpy as np
import pytest
from metal_emulator import Options, last_report, metal_kernel

ROW_SUM = """
    uint row = threadgroup_position_in_grid.x;
    uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
    threadgroup float part[32];
    float s = 0;
    for (uint i = thread_index_in_threadgroup; i < uint(x_shape[1]); i += threads_per_threadgroup.x)
      s += float(x[row * x_shape[1] + i]);
    s = simd_sum(s);
    if (lane == 0) part[sg] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
      float v = lane < simdgroups_per_threadgroup ? part[lane] : 0.0f;
      v = simd_sum(v);
      if (lane == 0) out[row] = v;
    }
"""


def test_an_elementwise_kernel_with_a_clipped_last_threadgroup():
    kernel = metal_kernel(
        "exponent", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = metal::exp(T(x[i]));"
    )
    x = mx.random.normal((300, 17), key=mx.random.key(0)).astype(mx.float16)
    (y,) = kernel(
        inputs=[x],
        template=[("T", mx.float32)],
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    want = np.exp(np.array(x, copy=False).astype(np.float32))
    assert np.allclose(np.array(y).astype(np.float32), want, rtol=1e-3)
    assert last_report().threadgroups == 20


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_row_sum_is_right_in_every_order(check, order):
    kernel = metal_kernel("row_sum", ["x"], ["out"], ROW_SUM)
    x = mx.random.normal((37, 1000), key=mx.random.key(1)).astype(mx.bfloat16)
    (out,) = kernel(
        inputs=[x],
        grid=(37 * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(37,)],
        output_dtypes=[mx.float32],
        options=Options(check=check, order=order, seed=order),
    )
    want = np.array(x.astype(mx.float32)).astype(np.float64).sum(1)
    assert np.allclose(np.array(out), want, rtol=1e-4, atol=1e-3)
    assert last_report().threadgroup_bytes == 128
    if check:
        assert last_report().traffic["x"] == (x.nbytes, 0)


def test_the_reduction_tree_can_be_changed_and_shows_rounding():
    kernel = metal_kernel("row_sum", ["x"], ["out"], ROW_SUM)
    x = mx.random.normal((64, 1000), key=mx.random.key(2)) * 1000
    results = [
        kernel(
            inputs=[x],
            grid=(64 * 128, 1, 1),
            threadgroup=(128, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            options=Options(sum_order=order),
        )[0]
        for order in (0, 1, 2)
    ]
    assert any(not mx.array_equal(results[0], other) for other in results[1:])
    assert all(mx.allclose(results[0], other, rtol=1e-3, atol=1e-1) for other in results[1:])


def test_strided_views_keep_their_strides_when_asked_to():
    kernel = metal_kernel(
        "strided",
        ["a"],
        ["o"],
        "uint i = thread_position_in_grid.x; o[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];",
        ensure_row_contiguous=False,
    )
    base = mx.arange(60).reshape(3, 4, 5).astype(mx.float32)
    for view in (base[0].T, base[:, 1:3, ::2], mx.broadcast_to(mx.arange(4), (3, 4))):
        (out,) = kernel(
            inputs=[view],
            grid=(view.size, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[view.shape],
            output_dtypes=[view.dtype],
        )
        assert mx.array_equal(out, view)


def test_a_matrix_product_of_fragments_equals_numpy():
    source = """
      simdgroup_matrix<float, 8, 8> a, b, c;
      simdgroup_load(a, x, 8);
      simdgroup_load(b, y, 8);
      simdgroup_multiply(c, a, b);
      simdgroup_store(c, out + thread_index_in_threadgroup * 0, 8);
    """
    kernel = metal_kernel("product", ["x", "y"], ["out"], source)
    x, y = (mx.random.normal((8, 8), key=mx.random.key(k)) for k in (3, 4))
    (out,) = kernel(
        inputs=[x, y],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )
    assert np.allclose(np.array(out), np.array(x) @ np.array(y), rtol=1e-5, atol=1e-5)


def test_lenient_mode_runs_the_active_lanes_only():
    kernel = metal_kernel(
        "active",
        ["x"],
        ["out"],
        "uint i = thread_position_in_grid.x; float v = x[i]; "
        "if (i % 2) v = simd_sum(v); out[i] = v;",
    )
    (out,) = kernel(
        inputs=[mx.arange(32).astype(mx.float32)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
        options=Options(strict=False),
    )
    assert out[1].item() == sum(range(1, 32, 2))
    assert out[2].item() == 2.0


def test_wrong_argument_counts_are_refused_as_mlx_refuses_them():
    kernel = metal_kernel("one", ["x"], ["y"], "y[0] = x[0];")
    with pytest.raises(ValueError, match="Expected `inputs` to have size 1 but got size 2"):
        kernel(
            inputs=[mx.zeros(8), mx.zeros(8)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
    with pytest.raises(ValueError, match="maximum allowed threads per threadgroup"):
        kernel(
            inputs=[mx.zeros(8)],
            grid=(2048, 1, 1),
            threadgroup=(2048, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
