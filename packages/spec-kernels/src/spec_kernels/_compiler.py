"""CUDA modules compiled ahead of MLX, and left where it looks for them.

`mx.fast.cuda_kernel` compiles every kernel together with MLX's own headers and CCCL, two seconds
each, and keeps nothing on disk, so each process waits again; and it assembles the text anew at each
call, and hashes it at each launch to find the module. NVRTC, which MLX brings, makes the same
module without those headers in a tenth of the time. It is left in the folder where MLX looks before
it compiles, under the name that MLX gives to a stub of a few words: the stub is what MLX is handed
from then on, and it never compiles it. Where anything is missing or another version of MLX looks
elsewhere, the stub fails, and MLX is handed the whole text as ever.

Knows how MLX names modules and passes arguments, nothing about any operation. Source:
`cuda_kernel`, `CustomKernel` and `JitModule` of MLX 0.32.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from spec_kernels._files import replace_file

TYPES = {
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
_PARTS = (("Shape", "shape"), ("Strides", "strides"), ("int", "ndim"))
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_PREAMBLE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef int int32_t;
typedef unsigned int uint32_t;
struct Shape { int at[8]; __device__ int operator[](int i) const { return at[i]; } };
struct Strides { long long at[8]; __device__ long long operator[](int i) const { return at[i]; } };
"""
# What MLX makes of a kernel's name, arguments and text, to the character.
_HANDED = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void %s(
%s) {
%s
}

} // namespace mlx::core::cu
"""
_SEED = 0xC70F6907  # of libstdc++'s std::hash
_kept_in: list[Path] = []  # see keep_modules_in


class CompilerError(RuntimeError):
    """A module could not be compiled here; the message says why."""


@dataclass(frozen=True)
class Module:
    """One kernel as its own module.

    Attributes:
        name: what `mx.fast.cuda_kernel` was given.
        helpers: text before the kernel.
        body: text of the kernel without its signature.
        inputs: name, dtype and axes of each input.
        outputs: name and dtype of each output.
        bounds: threads of a block, and blocks that must fit on a multiprocessor at once.
    """

    name: str
    helpers: str
    body: str
    inputs: tuple[tuple[str, mx.Dtype, int], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]
    bounds: tuple[int, int]

    @property
    def function(self) -> str:
        """What MLX calls the kernel."""
        return f"custom_kernel_{self.name}"

    @property
    def file(self) -> str:
        """What MLX calls the module, when it is handed the stub."""
        arguments = ",\n".join(f"    {argument}" for argument in self._arguments())
        stub = stub_of([name for name, _, _ in self.inputs], self.body)
        return f"{self.function}_{_hash(_HANDED % (self.function, arguments, stub)):x}"

    def source(self) -> str:
        """The whole text, with the arguments that MLX passes."""
        bounds = f"__launch_bounds__({self.bounds[0]}, {self.bounds[1]})"
        head = (
            f'extern "C" __global__ void {bounds} {self.function}({", ".join(self._arguments())})'
        )
        return f"{_PREAMBLE}{self.helpers}\n{head} {{\n{self.body}\n}}\n"

    def _arguments(self) -> list[str]:
        arguments = []
        for name, dtype, ndim in self.inputs:
            arguments.append(f"const {TYPES[dtype]}* {name}")
            arguments += [
                f"const __grid_constant__ {kind} {name}_{part}"
                for kind, part in _PARTS
                if ndim and f"{name}_{part}" in self.body
            ]
        return [*arguments, *(f"{TYPES[dtype]}* {name}" for name, dtype in self.outputs)]


def stub_of(inputs: Sequence[str], body: str) -> str:
    """What MLX is handed instead of `body`: what it shall pass of each input, and no kernel."""
    words = [f"{name}_{part}" for name in inputs for _, part in _PARTS]
    return " ".join(["#error", *(word for word in words if word in body)])


def leave(module: Module, architecture: str, folder: Path | None = None) -> bool:
    """Put a compiled module where MLX will find it, unless it is there already.

    Args:
        module: The kernel.
        architecture: What to compile for, such as "sm_90".
        folder: Where; MLX's own without.

    Returns:
        Whether it is there. If not, MLX compiles the kernel itself.
    """
    try:
        folder = folder or cache_folder()
        binary, names = (folder / f"{module.file}{end}" for end in (".ptx", ".txt"))
        if _whole(binary, names):
            return True
        made = compiled(module.source(), architecture)
        folder.mkdir(parents=True, exist_ok=True)
        # MLX reads lines with a tab: the name it asks for, and the one in the binary.
        listed = f"mlx::core::cu::{module.function}\t{module.function}\n{_digest(made)}\n"
        replace_file(names, listed.encode())
        replace_file(binary, made)
    except (CompilerError, OSError, KeyError, ValueError):
        return False
    return True


def keep_modules_in(folder: Path) -> None:
    """Name the folder in which MLX looks for modules.

    Where `MLX_PTX_CACHE_DIR` was set before MLX started, it is that; MLX's own choice, in the
    temporary folder, need not be named.
    """
    _kept_in[:] = [folder]


def cache_folder() -> Path:
    """Where MLX looks for compiled modules."""
    if _kept_in:
        return _kept_in[0]
    return Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"


def compiled(source: str, architecture: str) -> bytes:
    """The binary of a CUDA text for one architecture, such as "sm_90".

    Raises:
        CompilerError: NVRTC or CUDA's headers were not found, or the text is wrong.
    """
    nvrtc, program = _library(), ctypes.c_void_p()
    code = source.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"kernel.cu", 0, None, None):
        raise CompilerError("NVRTC cannot begin a program.")
    try:
        options = [f"--gpu-architecture={architecture}", f"--include-path={_headers()}"]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise CompilerError(_read(nvrtc, program, "ProgramLog").decode(errors="replace"))
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
        raise CompilerError(f"NVRTC has no {what}.")
    held = ctypes.create_string_buffer(size.value)
    if getattr(nvrtc, f"nvrtcGet{what}")(program, held):
        raise CompilerError(f"NVRTC has no {what}.")
    return held.raw


def _wheels() -> Sequence[Path]:
    """Folders of NVIDIA's wheels, below which `lib` and `include` lie."""
    found = importlib.util.find_spec("nvidia")
    places = (found and found.submodule_search_locations) or []
    return [folder for place in places for folder in sorted(Path(place).iterdir())]


@functools.cache
def _library() -> ctypes.CDLL:
    """NVRTC: MLX has loaded it on a CUDA machine, so its bare name finds it."""
    for name in _LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    for path in (folder / "lib" / name for name in _LIBRARIES for folder in _wheels()):
        with contextlib.suppress(OSError):
            for beside in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(beside))  # NVRTC asks for it by its bare name
            return ctypes.CDLL(str(path))
    raise CompilerError("No NVRTC was found.")


@functools.cache
def _headers() -> Path:
    """The folder of CUDA's headers."""
    for folder in [*_wheels(), Path("/usr/local/cuda")]:
        if (folder / "include" / "cuda_bf16.h").exists():
            return folder / "include"
    raise CompilerError("CUDA's headers were not found.")


def _hash(text: str) -> int:
    """The hash by which MLX tells texts apart: libstdc++'s own, whose library it has loaded."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")["_ZSt11_Hash_bytesPKvmm"]
    except (OSError, AttributeError) as error:
        raise CompilerError("libstdc++ was not found.") from error
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, *[ctypes.c_size_t] * 2]
    code = text.encode()
    return function(code, len(code), _SEED)


def _digest(binary: bytes) -> str:
    return hashlib.sha256(binary).hexdigest()


def _whole(binary: Path, names: Path) -> bool:
    """Whether both files are there, and the binary is the one that was written."""
    try:
        return names.read_text(encoding="utf-8").splitlines()[-1] == _digest(binary.read_bytes())
    except (OSError, UnicodeDecodeError, IndexError):
        return False
