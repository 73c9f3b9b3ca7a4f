"""CUDA modules made without MLX: every text compiles, and what is left for MLX is whole."""

import sys
import types
from pathlib import Path

import mlx.core as mx
import pytest

from spec_kernels import _compiler, keep_modules_in
from spec_kernels._compiler import CompilerError, Module, compiled, leave
from spec_kernels.attention import _CudaAttend
from spec_kernels.matmul import RowMatmul
from spec_kernels.numerics import MatmulShape, random_weight

ARCHITECTURES = ("sm_80", "sm_90")
ADD = Module(
    "add",
    "__device__ float twice(float v) { return v + v; }",
    "  if (threadIdx.x < x_shape[0]) y[threadIdx.x] = twice(x[threadIdx.x]) + n[0];",
    (("x", mx.float32, 1), ("n", mx.int32, 0)),
    (("y", mx.float32),),
    (64, 1),
)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    """MLX's factory refuses to exist without a CUDA device; here nothing is launched."""
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: None)


@pytest.fixture
def nvrtc():
    try:
        _compiler._library(), _compiler._headers()
    except CompilerError as missing:
        pytest.skip(f"{missing} Install nvidia-cuda-nvrtc and nvidia-cuda-runtime.")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("bits", "group"), [(2, 32), (3, 64), (4, 64), (5, 128), (6, 64), (8, 64), (16, 64)]
)
def test_every_matmul_compiles(nvrtc, bits, group, dtype, architecture):
    weight = random_weight(MatmulShape(48, 384, bits, group, dtype))
    matmul = RowMatmul(weight, "cuda")
    for kernel, rows in zip(matmul._kernels, (8, 16), strict=True):
        x = mx.zeros((rows, 384), weight.dtype)
        module = kernel.module([x, *matmul._arrays], [weight.dtype])
        assert compiled(module.source(), architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("heads", "queries", "depth"), [(9, 1, 64), (32, 8, 128), (6, 16, 96)])
def test_every_attention_compiles(nvrtc, heads, queries, depth, architecture):
    attend = _CudaAttend((1, heads, queries, depth), 3, mx.bfloat16, True, mx.array([1.0]))
    q, k = (mx.zeros((1, n, 64, depth), mx.bfloat16) for n in (heads, 3))
    given = [q, k, k, mx.zeros(1), mx.array(3)]
    first = attend._attend.module(given, [mx.float32] * 3)
    fresh = attend._attend_fresh.module([*given, k, k], [mx.float32] * 3)
    partials = [mx.zeros((3, 4, 5, depth)), mx.zeros((3, 4, 5)), mx.zeros((3, 4, 5))]
    second = attend._merge.module([*partials, attend._dims], [mx.bfloat16])
    for module in (first, fresh, second):
        assert compiled(module.source(), architecture).startswith(b"\x7fELF")


def test_a_module_takes_the_arguments_that_mlx_passes():
    """A pointer each, then what the text mentions; a scalar input has neither shape nor strides."""
    text = " ".join(ADD.source().split())
    assert (
        'extern "C" __global__ void __launch_bounds__(64, 1) custom_kernel_add('
        "const float* x, const __grid_constant__ Shape x_shape, const int32_t* n, float* y)" in text
    )


def test_a_wrong_text_is_reported_with_the_compilers_words(nvrtc):
    with pytest.raises(CompilerError, match="identifier .* is undefined"):
        compiled("__global__ void f() { missing(); }", "sm_90")


def test_a_module_is_compiled_once_and_again_when_damaged(nvrtc, tmp_path, monkeypatch):
    assert leave(ADD, "sm_90", tmp_path)
    binary, names = tmp_path / f"{ADD.file}.ptx", tmp_path / f"{ADD.file}.txt"
    made = binary.read_bytes()
    assert (
        names.read_text().splitlines()[0] == "mlx::core::cu::custom_kernel_add\tcustom_kernel_add"
    )
    assert b"custom_kernel_add" in made and len(list(tmp_path.iterdir())) == 2
    calls = []
    monkeypatch.setattr(
        _compiler, "compiled", lambda *given: calls.append(given) or compiled(*given)
    )
    assert leave(ADD, "sm_90", tmp_path) and not calls
    for damage in (made[:100], b"", made[:-1] + b"?"):
        binary.write_bytes(damage)
        assert leave(ADD, "sm_90", tmp_path)
        assert binary.read_bytes() == made
    names.write_bytes(b"\xff\xfe")
    assert leave(ADD, "sm_90", tmp_path)
    assert len(calls) == 4


def test_nothing_is_left_where_nothing_can_be_compiled_or_written(nvrtc, tmp_path, monkeypatch):
    assert not leave(ADD, "sm_1", tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert not leave(ADD, "sm_90", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_processes_may_leave_the_same_module_at_once(nvrtc, tmp_path, monkeypatch):
    """Each writes aside and puts both files in place, in whatever order the steps fall."""
    binary, names = tmp_path / f"{ADD.file}.ptx", tmp_path / f"{ADD.file}.txt"
    replace, others = _compiler.replace_file, [b"of another compiler"]

    def disturbed(path, content):
        replace(path, content)
        if path == names and others:  # the other process is done between our two steps
            replace(names, f"of another\n{_compiler._digest(others[0])}\n".encode())
            replace(binary, others.pop())

    monkeypatch.setattr(_compiler, "replace_file", disturbed)
    assert leave(ADD, "sm_90", tmp_path) and binary.read_bytes().startswith(b"\x7fELF")
    assert not _compiler._whole(binary, names)  # so the next one does it again
    assert leave(ADD, "sm_90", tmp_path) and _compiler._whole(binary, names)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupt_leaves_no_scraps(nvrtc, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        leave(ADD, "sm_90", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("headers", [True, False])
def test_nothing_is_left_without_headers_or_beside_an_odd_module(
    nvrtc, tmp_path, monkeypatch, headers
):
    """A program of its own may be called nvidia; Python then refuses to say where it is."""
    odd = types.ModuleType("nvidia")
    odd.__spec__ = None
    if headers:
        monkeypatch.setitem(sys.modules, "nvidia", odd)
    monkeypatch.setattr(_compiler, "_wheels", _compiler._wheels if headers else list)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    _compiler._headers.cache_clear()
    try:
        assert not leave(ADD, "sm_90", tmp_path)
    finally:
        _compiler._headers.cache_clear()
    assert not list(tmp_path.iterdir())


def test_a_machine_without_the_compiler_leaves_the_work_to_mlx(tmp_path, monkeypatch):
    monkeypatch.setattr(_compiler, "_LIBRARIES", ("libnothing.so.0",))
    _compiler._library.cache_clear()
    try:
        assert not leave(ADD, "sm_90", tmp_path / "new")
    finally:
        _compiler._library.cache_clear()
    assert not (tmp_path / "new").exists()


def test_the_folder_is_the_one_mlx_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(_compiler, "_kept_in", [])
    assert _compiler.cache_folder().parts[-3:] == ("mlx", mx.__version__, "ptx")
    keep_modules_in(tmp_path)
    assert _compiler.cache_folder() == tmp_path


def test_a_module_is_named_after_the_text_that_mlx_makes_of_the_stub():
    """The name, and libstdc++'s hash of the text in hexadecimal: once written out by hand."""
    assert _compiler.stub_of(["x", "n"], ADD.body) == "#error x_shape"
    text = (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        "__global__ void custom_kernel_add(\n    const float* x,\n"
        "    const __grid_constant__ Shape x_shape,\n    const int32_t* n,\n    float* y) {\n"
        "#error x_shape\n}\n\n} // namespace mlx::core::cu\n"
    )
    assert ADD.file == f"custom_kernel_add_{murmur64(text.encode(), 0xC70F6907):x}"


def murmur64(data: bytes, seed: int) -> int:
    """MurmurHash64A, which libstdc++ uses, from its published description."""
    m, mask = 0xC6A4A7935BD1E995, 2**64 - 1
    mixed = (seed ^ (len(data) * m)) & mask
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        k = int.from_bytes(data[at : at + 8], "little") * m & mask
        k = (k ^ (k >> 47)) * m & mask
        mixed = (mixed ^ k) * m & mask
    if len(data) > whole:
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * m & mask
    mixed = (mixed ^ (mixed >> 47)) * m & mask
    return mixed ^ (mixed >> 47)
