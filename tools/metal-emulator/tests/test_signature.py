"""The generated text equals what MLX itself generates, character by character."""

import ctypes
import os
from pathlib import Path

import mlx.core as mx
import pytest
from metal_emulator import generate
from metal_emulator.signature import Call

HALF, BRAIN, FLOAT = mx.float16, mx.bfloat16, mx.float32
CASES = {
    "one attribute": Call(
        "a", "", "uint i = thread_position_in_grid.x; o[i] = x[i];", ["x"],
        [mx.zeros((32,), FLOAT)], ["o"], [FLOAT], [],
    ),
    "shapes, scalars, template": Call(
        "b", "// h\n",
        "int d = x_shape[0] + s_ndim + w_strides[1] + n_shape; "
        "uint t = threads_per_threadgroup.x + simdgroup_index_in_threadgroup; o[t] = T(d);",
        ["w", "s", "x", "n"],
        [mx.zeros((4, 8), mx.uint32), mx.zeros((4, 1), BRAIN), mx.zeros((64,), HALF), mx.array(3)],
        ["o", "p"], [HALF, BRAIN], [("T", BRAIN), ("B", 4), ("F", True), ("G", False)],
    ),
    "constant and device inputs": Call(
        "c", "", "o[0] = x[0] + y[0];", ["x", "y"],
        [mx.zeros((7,), mx.int8), mx.zeros((8,), mx.uint8)], ["o"], [FLOAT], [],
    ),
    "no attribute, two outputs": Call(
        "d", "", "int a = x_shape[0]; o[0] = a; q[0] = a;", ["x"], [mx.zeros((9,), mx.int64)],
        ["o", "q"], [FLOAT, mx.int32], [],
    ),
    "atomic outputs, negative constant": Call(
        "e", "",
        "uint e = grid_size.x + dispatch_threads_per_threadgroup.x + thread_index_in_quadgroup; "
        "atomic_fetch_add_explicit(&o[0], x[e], memory_order_relaxed);",
        ["x"], [mx.zeros((32,), FLOAT)], ["o"], [FLOAT], [("N", -3)], True,
    ),
    "a name that only contains an injected one": Call(
        "f", "", "int max_shape = 3; o[0] = max_shape;", ["x"], [mx.zeros((32,), mx.bool_)],
        ["o"], [mx.bool_], [],
    ),
}  # fmt: skip


def mlx_text(call: Call, folder: Path) -> str:
    """What MLX prints for the same call: tracing records a Metal kernel on every build."""
    kernel = mx.fast.metal_kernel(
        name=call.name,
        input_names=list(call.input_names),
        output_names=list(call.output_names),
        source=call.source,
        header=call.header,
        atomic_outputs=call.atomic,
    )

    def trace(*arrays: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(arrays),
            output_shapes=[(4,)] * len(call.output_dtypes),
            output_dtypes=list(call.output_dtypes),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            template=list(call.template) or None,
            verbose=True,
        )

    printed = folder / "printed"
    with printed.open("wb") as sink:
        saved = os.dup(1)
        os.dup2(sink.fileno(), 1)
        try:
            mx.export_function(str(folder / "f.mlxfn"), trace, *call.inputs)
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
    return printed.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_the_generated_text_is_mlxs_own(name, tmp_path):
    call = CASES[name]
    generated = generate(call)
    text = f"{generated.body}{generated.instantiation}"
    want = f"Generated source code for `{call.name}`:\n```\n{text}\n```\n"
    assert mlx_text(call, tmp_path) == want
