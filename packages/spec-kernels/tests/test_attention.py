"""Multi-row attention: reference and dispatcher anywhere, the Metal kernels in the emulator."""

import functools

import metal_emulator
import mlx.core as mx
import pytest
from metal_emulator import Options, last_report

from spec_kernels import KernelError, row_attention, row_attention_metal, row_attention_ops
from spec_kernels.attention import FAR, NEAR, SHIFT, n_chunks
from spec_kernels.numerics import AttentionShape, attention_problem, relative_error

checked = functools.partial(metal_emulator.metal_kernel, options=Options(check=True))
TOLERANCE = {mx.bfloat16: 1e-2, mx.float16: 2e-3}


def problem(heads, kv_heads, depth, queries, keys, dtype=mx.bfloat16, spare=0, batch=1):
    """Random q, and k and v as views of a longer cache, as a KV cache hands them out."""
    q = mx.random.normal((batch, heads, queries, depth), key=mx.random.key(0)).astype(dtype)
    cache = mx.random.normal(
        (2, batch, kv_heads, keys + spare, depth), key=mx.random.key(1)
    ).astype(dtype)
    return q, cache[0][:, :, :keys], cache[1][:, :, :keys]


def reference(q, k, v, mask):
    return row_attention_ops(
        *(a.astype(mx.float32) for a in (q, k, v)), scale=q.shape[-1] ** -0.5, mask=mask
    )


def emulated(q, k, v, mask, factory=metal_emulator.metal_kernel):
    return row_attention_metal(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask, factory=factory)


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("shape", [(4, 2, 64, 5, 77), (8, 8, 64, 1, 33), (6, 2, 64, 16, 130)])
def test_the_reference_equals_mlxs_own_attention_in_float32(shape, mask):
    q, k, v = problem(*shape, dtype=mx.float32)
    stock = mx.fast.scaled_dot_product_attention(q, k, v, scale=shape[2] ** -0.5, mask=mask)
    assert mx.allclose(reference(q, k, v, mask), stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "mask"),
    [
        ((8, 2, 64, 1, 33), mx.bfloat16, "causal"),
        ((8, 2, 64, 4, 300), mx.bfloat16, "causal"),
        ((8, 2, 64, 4, 300), mx.float16, None),
        ((2, 2, 128, 3, 140), mx.bfloat16, "causal"),
        ((16, 2, 64, 16, 150), mx.bfloat16, "causal"),
    ],
    ids=str,
)
def test_the_metal_kernels_agree_with_the_reference(emulator, shape, dtype, mask):
    q, k, v = problem(*shape, dtype=dtype, spare=23)
    error = relative_error(emulated(q, k, v, mask), reference(q, k, v, mask))
    assert error < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 4, 96, 3, 100), (16, 2, 128, 8, 257), (8, 2, 80, 5, 515)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask", ["causal", None])
def test_more_shapes_agree_with_the_reference(emulator, shape, dtype, mask):
    q, k, v = problem(*shape, dtype=dtype, spare=5)
    error = relative_error(emulated(q, k, v, mask), reference(q, k, v, mask))
    assert error < TOLERANCE[dtype]


@pytest.mark.slow
def test_the_metal_kernels_pass_their_own_gate_in_the_emulator(emulator):
    shape = AttentionShape(8, 2, 64, "bfloat16")
    assert attention_problem(shape, "metal", factory=metal_emulator.metal_kernel) is None


def test_a_query_has_the_same_bits_alone_and_beside_others(emulator):
    """Alone means: when it was the newest position, on the cache as long as it was then."""
    q, k, v = problem(8, 2, 64, 16, 150)
    full = emulated(q, k, v, "causal")
    for i in (0, 3, 9, 15):
        keys = 150 - 15 + i
        alone = emulated(q[:, :, i : i + 1], k[:, :, :keys], v[:, :, :keys], "causal")
        assert mx.array_equal(alone[:, :, 0], full[:, :, i]), i
    for first in (8, 11):
        part = emulated(q[:, :, first:], k, v, "causal")
        assert mx.array_equal(part, full[:, :, first:]), first


def test_a_longer_cache_leaves_no_trace_across_a_chunk_border(emulator):
    q, k, v = problem(2, 2, 64, 4, NEAR + 2)
    full = emulated(q, k, v, "causal")
    alone = emulated(q[:, :, :1], k[:, :, : NEAR - 1], v[:, :, : NEAR - 1], "causal")
    assert n_chunks(NEAR - 1) == 1 and n_chunks(NEAR + 2) == 2
    assert mx.array_equal(alone[:, :, 0], full[:, :, 0])


def test_keys_and_values_are_requested_once_a_threadgroup(emulator):
    q, k, v = problem(8, 2, 64, 4, 160)
    seen = []

    def factory(**arguments):
        kernel = checked(**arguments)

        def call(**inputs):
            out = kernel(**inputs)
            seen.append(last_report().traffic)
            return out

        return call

    emulated(q, k, v, "causal", factory)
    assert seen[0]["k"] == (k.nbytes, 0)
    assert seen[0]["v"] == (v.nbytes, 0)


def test_batches_and_strided_caches_are_served(emulator):
    q, k, v = problem(4, 2, 64, 2, 40, spare=9, batch=2)
    assert relative_error(emulated(q, k, v, "causal"), reference(q, k, v, "causal")) < 1e-2


@pytest.mark.parametrize(
    ("keys", "chunks"),
    [(1, 1), (NEAR, 1), (NEAR + 1, 2), (SHIFT, 16), (SHIFT + 1, 17), (SHIFT + FAR + 1, 18)],
)
def test_chunks_are_fixed_ranges_of_positions(keys, chunks):
    assert n_chunks(keys) == chunks


@pytest.mark.parametrize(
    ("q_shape", "dtype", "mask", "reason"),
    [
        ((1, 8, 17, 64), mx.bfloat16, "causal", "17 query positions"),
        ((1, 8, 4, 256), mx.bfloat16, "causal", "head dimension 256"),
        ((1, 8, 4, 64), mx.float32, "causal", "16 bits"),
        ((1, 7, 4, 64), mx.bfloat16, "causal", "must be a multiple of"),
        ((1, 8, 4, 64), mx.bfloat16, mx.ones((4, 64)), "causal mask or none"),
    ],
)
def test_what_the_kernels_cannot_take_is_named(q_shape, dtype, mask, reason):
    q = mx.zeros(q_shape, dtype)
    k = mx.zeros((1, 2, 64, q_shape[-1]), dtype)
    with pytest.raises(KernelError, match=rf"\[row_attention\] .*(?i:{reason}).* Use stock MLX\."):
        row_attention_metal(q, k, k, scale=1.0, mask=mask)


def test_the_dispatcher_reports_stock_on_a_cpu():
    q, k, v = problem(4, 2, 64, 2, 40, dtype=mx.float32)
    out, choice = row_attention(q, k, v, scale=0.125, mask="causal")
    assert choice == ("stock", "no kernel for the CPU")
    assert mx.allclose(out, reference(q, k, v, "causal"), rtol=1e-4, atol=1e-5)
