"""Bugs of every kind the emulator promises to catch, planted one at a time."""

import mlx.core as mx
import pytest
from metal_emulator import EmulatorError, Options, metal_kernel

HEAD = "uint i = thread_position_in_grid.x; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
TRANSPOSE = """
  threadgroup T tile[16][17];
  uint2 g = threadgroup_position_in_grid.xy; uint2 l = thread_position_in_threadgroup.xy;
  tile[l.y][l.x] = x[(g.y * 16 + l.y) * x_shape[1] + g.x * 16 + l.x];
  BARRIER
  out[(g.x * 16 + l.y) * x_shape[0] + g.y * 16 + l.x] = tile[l.x][l.y];
"""
# name, source, whether it takes check mode, what the report must say
BUGS = [
    ("barrier in a divergent branch", f"if (i < 40) {BARRIER} out[i] = x[i];", False,
     "barrier divergence"),
    ("barrier after an early return", f"if (i >= 40) return; {BARRIER} out[i] = x[i];", False,
     "barrier divergence"),
    ("simd_sum in a divergent branch",
     "float v = x[i]; if (i % 2) v = simd_sum(v); out[i] = v;", False, "divergent simd_sum"),
    ("matrix product in a divergent branch",
     "simdgroup_matrix<float, 8, 8> a, b, c; "
     "if (i < 40) simdgroup_multiply_accumulate(c, a, b, c); out[i] = 0;", False,
     "divergent simdgroup_multiply"),
    ("read far past the end", "out[i] = x[i + 8192];", False, "past the end of buffer 0"),
    ("read just past the end", "out[i] = x[i + 1];", True, "read of 4 bytes"),
    ("write past the end", "out[i + 1] = x[i];", True, "write of 4 bytes"),
    ("write to an input", "((device float*)x)[i] = 1.0f; out[i] = 0;", True, "write to input"),
    ("two writers of one element", "out[i / 2] = x[i];", True, "two different threads"),
    ("implicit float to bfloat", "bfloat b = x[i]; out[i] = b;", False, "bfloat"),
    ("double", "double b = x[i]; out[i] = b;", False, "double"),
    ("misaligned vector load",
     "out[i] = (*(const device float2*)(x + (i % 32) * 2 + (i > 3))).x;", True, "misaligned"),
    ("too much threadgroup memory",
     "threadgroup float big[9000]; big[i] = x[i]; out[i] = big[i];", False, "exceeds"),
    ("missing simdgroup barrier",
     "threadgroup float t[64]; t[i] = x[i]; out[i] = t[i ^ 1];", True, "race"),
]  # fmt: skip


def run(source: str, *, check: bool = False) -> mx.array:
    kernel = metal_kernel("planted", ["x"], ["out"], HEAD + source)
    (out,) = kernel(
        inputs=[mx.arange(64).astype(mx.float32)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
        options=Options(check=check),
    )
    return out


@pytest.mark.parametrize(
    ("source", "check", "message"), [b[1:] for b in BUGS], ids=[b[0] for b in BUGS]
)
def test_a_planted_bug_is_caught(source, check, message):
    with pytest.raises(EmulatorError, match=message):
        run(source, check=check)


def transpose(barrier: str, check: bool) -> tuple[mx.array, mx.array]:
    kernel = metal_kernel("transpose", ["x"], ["out"], TRANSPOSE.replace("BARRIER", barrier))
    x = mx.random.normal((64, 96), key=mx.random.key(0)).astype(mx.float16)
    (out,) = kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(96, 64, 1),
        threadgroup=(16, 16, 1),
        output_shapes=[(96, 64)],
        output_dtypes=[x.dtype],
        options=Options(check=check),
    )
    return out, x.T


@pytest.mark.parametrize("check", [False, True])
def test_a_correct_transpose_passes(check):
    out, want = transpose(BARRIER, check)
    assert mx.array_equal(out, want)


def test_a_missing_barrier_gives_a_wrong_result_and_a_race():
    out, want = transpose("", False)
    assert not mx.array_equal(out, want)
    with pytest.raises(EmulatorError, match="threadgroup memory race"):
        transpose("", True)


def test_an_element_never_written_is_nan():
    out = run("if (i != 7) out[i] = x[i];")
    assert mx.isnan(out).tolist() == [i == 7 for i in range(64)]


def test_a_crash_in_a_kernel_leaves_the_process_alive():
    with pytest.raises(EmulatorError, match="signal 11"):
        run("out[i] = *(const device float*)(size_t(i) * 4096);")
    assert run("out[i] = x[i];")[5].item() == 5.0
