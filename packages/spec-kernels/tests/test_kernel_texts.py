"""Every Metal text passes the linter; texts and names are fit for MLX's cache."""

import subprocess
from importlib import resources

import mlx.core as mx
import pytest
from metal_emulator import lint

from spec_kernels import _build, _compiler
from spec_kernels._build import CudaKernel, Text, read_text, revision
from spec_kernels.matmul import _prelude

METAL = sorted(p.name for p in (resources.files("spec_kernels") / "metal").iterdir())


@pytest.mark.parametrize("name", METAL)
def test_metal_text_passes_the_linter(name):
    assert lint(read_text("metal", name)) == []


def test_the_linter_sees_a_missing_address_space_in_a_real_kernel():
    text = read_text("metal", "row_attention.metal")
    broken = text.replace("const device T* kp", "const T* kp")
    assert broken != text
    assert len(lint(broken)) == 1


def test_a_revision_names_the_texts():
    assert len(revision()) == 12 and revision() == revision()


def test_a_cuda_name_carries_everything_that_goes_into_the_kernel(monkeypatch):
    """MLX's CUDA backend finds compiled kernels by name alone."""
    names = []

    def factory(**arguments):
        names.append(arguments["name"])

    monkeypatch.setattr(mx.fast, "cuda_kernel", factory)
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "text of " + name)
    text = Text("op", ("x",), ("y",), header="op_header")
    for template, threads, blocks in (
        ((("T", mx.float16),), 128, 1),
        ((("T", mx.bfloat16),), 128, 1),
        ((("T", mx.float16),), 256, 1),
        ((("T", mx.float16),), 128, 2),
    ):
        CudaKernel(text, template, threads, blocks)
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "another text")
    CudaKernel(text, (("T", mx.float16),), 128)
    CudaKernel(text, (("T", mx.float16),), 128, prelude="int tile;")
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_80"})
    CudaKernel(text, (("T", mx.float16),), 128)
    assert len(set(names)) == 7
    assert all(name.startswith("spec_op_") for name in names)


PICK = """
#include <cstdio>
struct { int x; } blockIdx;
constexpr int NT = 2;
typedef const int* In;
typedef int* Out;
void pick(In w0, In w0_shape, In scales0, In biases0, Out y0, In w1, In w1_shape, In scales1,
          In biases1, Out y1, In w2, In w2_shape, In scales2, In biases2, Out y2) {
PRELUDE
  std::printf("%d %d %d %d %d %d\\n", tile, N, *w, *scales, *biases, *y);
}
int main() {
  const int v[] = {0, 1, 2}, n[] = {65, 32, 1};
  int o[] = {0, 1, 2};
  for (blockIdx.x = 0; blockIdx.x < 5; ++blockIdx.x)
    pick(v, n, v, v, o, v + 1, n + 1, v + 1, v + 1, o + 1, v + 2, n + 2, v + 2, v + 2, o + 2);
}
"""


def test_blocks_of_a_shared_launch_find_their_weight(emulator, tmp_path):
    """The CUDA lines that choose a sibling, compiled as C++: 3, 1 and 1 blocks of 32 rows."""
    source, program = tmp_path / "pick.cpp", tmp_path / "pick"
    source.write_text(PICK.replace("PRELUDE", _prelude(3)), encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "0 65 0 0 0 0",
        "1 65 0 0 0 0",
        "2 65 0 0 0 0",
        "0 32 1 1 1 1",
        "0 1 2 2 2 2",
    ]


class Backend:
    """MLX's CUDA factory as far as it matters here: a stub's module is found, or it fails."""

    def __init__(self, finds):
        self.finds, self.sources = finds, []

    def __call__(self, *, name, source, header, **others):
        def call(**arguments):
            if source.startswith("#error") and not self.finds:
                raise RuntimeError("Failed to compile kernel")
            self.sources.append(source)
            return [mx.zeros(4)]

        return call


@pytest.mark.parametrize(("left", "finds"), [(True, True), (True, False), (False, True)])
def test_a_stub_stands_in_where_mlx_finds_what_was_compiled_ahead(monkeypatch, left, finds):
    backend = Backend(finds)
    monkeypatch.setattr(mx.fast, "cuda_kernel", backend)
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "y[0] = x_shape; // " * 50)
    monkeypatch.setattr(_compiler, "leave", lambda module, architecture: left)
    kernel = CudaKernel(Text("op", ("x",), ("y",)), (("N", 4), ("B", True)), 64)
    assert not kernel.settled
    for _ in range(4):
        kernel(inputs=[mx.zeros(4)], output_dtypes=[mx.float32])
    assert kernel.settled
    if left and finds:
        assert backend.sources == ["#error x_shape"] * 5
    else:
        assert len(backend.sources) == 4
        assert all("constexpr int N = 4" in source for source in backend.sources)


@pytest.mark.parametrize("finds", [True, False])
def test_a_kernel_that_is_met_in_a_trace_is_tried_there_on_zeros(monkeypatch, finds):
    """Traced inputs have no value; the others, such as dimensions, are tried as they are."""
    tried = []

    def factory(*, source, **others):
        stub = source.startswith("#error")

        def call(*, inputs, **arguments):
            if stub and not finds:
                raise RuntimeError("Failed to compile kernel")
            if stub and not tried:
                tried.extend(array.tolist() for array in inputs)
            return [inputs[0] * (2.0 if stub else 1.0)]

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", factory)
    monkeypatch.setattr(_compiler, "leave", lambda module, architecture: True)
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "y[0] = x_shape;")
    kernel, dims = CudaKernel(Text("op", ("x", "n", "d"), ("y",)), (), 64), mx.array([3, 5])
    traced = mx.compile(lambda x, n: kernel(inputs=[x, n, dims], output_dtypes=[x.dtype])[0])
    assert traced(mx.ones((2, 4)), mx.array(7)).tolist() == [[2.0 if finds else 1.0] * 4] * 2
    assert kernel.settled and tried == ([[[0.0] * 4] * 2, 0, [3, 5]] if finds else [])
