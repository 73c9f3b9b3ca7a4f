"""Kernel texts, and the callables MLX makes of them.

A text is compiled once per process and specialisation, on CUDA once per machine. MLX's CUDA backend
finds a compiled kernel by its name alone, also on disk, so every CUDA name here carries a digest of
all that went into it. Knows nothing about any one operation.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, cast

import mlx.core as mx

from spec_kernels import _compiler

Backend = Literal["metal", "cuda", "cpu"]
Kernel = Callable[..., Any]
Factory = Callable[..., Kernel]
Template = tuple[tuple[str, Any], ...]

MAX_ROWS = {"metal": 16, "cuda": 32, "cpu": 16}
"""Rows of a matmul, and query positions of attention, that the kernels of a backend serve."""


class KernelError(RuntimeError):
    """A kernel cannot serve what was asked of it.

    The message names the operation and the remedy.
    """


class ExactError(KernelError):
    """Row-invariant results were asked for, and some operation cannot give them."""


@dataclass(frozen=True)
class Text:
    """One kernel as text.

    Attributes:
        name: file below `metal/` and `cuda/`, and prefix of the compiled name.
        inputs: names of the input arrays, in order.
        outputs: names of the output arrays, in order.
        header: file with the helpers, or None.
        row_contiguous: whether MLX copies strided inputs first.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str | None = None
    row_contiguous: bool = True


@functools.cache
def backend() -> Backend:
    """The kind of device MLX computes on by default in this process."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


@functools.cache
def read_text(folder: str, name: str) -> str:
    """The kernel text stored as `folder/name` in this package."""
    return (resources.files("spec_kernels") / folder / name).read_text(encoding="utf-8")


@functools.cache
def metal_kernel(text: Text, factory: Factory | None = None) -> Kernel:
    """The Metal kernel of `text`; `factory` may be an emulator's, else MLX's."""
    header = read_text("metal", f"{text.header}.metal") if text.header else ""
    make = factory or cast(Factory, mx.fast.metal_kernel)
    return make(
        name=f"spec_{text.name}",
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=read_text("metal", f"{text.name}.metal"),
        header=header,
        ensure_row_contiguous=text.row_contiguous,
    )


class CudaKernel:
    """One specialisation of a CUDA text.

    The first call compiles it, and from then on MLX is handed a stub in its place, which costs less
    at every launch (see `_compiler`). Where MLX does not find what the stub stands for, it is
    handed the whole text.

    Args:
        text: the kernel.
        constants: names and values of its compile-time constants.
        threads: threads of a block, which bounds the registers of each.
        blocks: blocks that must fit on a multiprocessor at once.
        shared: bytes of dynamic shared memory of a block.
        prelude: lines before the text's own.
    """

    def __init__(
        self,
        text: Text,
        constants: Template,
        threads: int,
        blocks: int = 1,
        shared: int = 0,
        prelude: str = "",
    ) -> None:
        self.text, self.bounds = text, (threads, blocks)
        self.helpers = read_text("cuda", f"{text.header}.cu") if text.header else ""
        header = self.helpers + (
            "\n#undef __global__\n#define __global__ __attribute__((global)) "
            f"__launch_bounds__({threads}, {blocks})\n"
        )
        lines = "".join(_constant(name, value) for name, value in constants)
        self.source = source = lines + prelude + read_text("cuda", f"{text.name}.cu")
        self._architecture = str(mx.device_info().get("architecture", "unknown"))
        whole = f"{self._architecture}\0{header}\0{source}"
        self.name = f"spec_{text.name}_{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
        self._make = functools.partial(
            cast(Factory, mx.fast.cuda_kernel),
            name=self.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            ensure_row_contiguous=text.row_contiguous,
            shared_memory=shared,
        )
        self._kernel = self._make(source=source, header=header)
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether `kernel` is final, so that a caller may keep it."""
        return self._settled

    @property
    def kernel(self) -> Kernel:
        """MLX's own callable, as of now."""
        return self._kernel

    def __call__(self, **arguments: Any) -> list[mx.array]:
        """Launch, with the arguments of MLX's own kernels but no template."""
        if not self._settled:
            self._settle(arguments)
        return self._kernel(**arguments)

    def module(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> _compiler.Module:
        """The kernel as a module of its own, for inputs like these."""
        arrays = zip(self.text.inputs, inputs, strict=True)
        return _compiler.Module(
            self.name,
            self.helpers,
            self.source,
            tuple((name, array.dtype, array.ndim) for name, array in arrays),
            tuple(zip(self.text.outputs, output_dtypes, strict=True)),
            self.bounds,
        )

    def _settle(self, arguments: dict[str, Any]) -> None:
        module = self.module(arguments["inputs"], arguments["output_dtypes"])
        if _compiler.leave(module, self._architecture):
            stub = self._make(source=_compiler.stub_of(self.text.inputs, self.source), header="")
            tried = {**arguments, "inputs": [_stand_in(a) for a in arguments["inputs"]]}
            # MLX may not find it, and an `#error` is all it was handed.
            with contextlib.suppress(RuntimeError, ValueError):
                mx.eval(stub(**tried))  # sync: loads the module, once per process
                self._kernel = stub
        self._settled = True


def _stand_in(array: mx.array) -> mx.array:
    """The array; inside a trace, where it has no value yet, zeros of its shape.

    Attention over whole buffers is met in traces alone. No kernel here takes a number from a traced
    input with which zeros would lead out of bounds: no keys are no work.
    """
    try:
        mx.eval(array)  # sync: whatever it is, the launch waits for it
    except ValueError:
        return mx.broadcast_to(mx.zeros(array.shape[-1:], array.dtype), array.shape)
    return array


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_compiler.TYPES[value]};\n"
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    return f"  constexpr int {name} = {value};\n"


@functools.cache
def cuda_kernel(
    text: Text,
    constants: Template,
    threads: int,
    blocks: int = 1,
    shared: int = 0,
    prelude: str = "",
) -> CudaKernel:
    """The kernel of `text` for one specialisation, made once; see `CudaKernel`."""
    return CudaKernel(text, constants, threads, blocks, shared, prelude)


def revision() -> str:
    """Digest of every kernel text of this package: part of the key of a stored verdict."""
    digest = hashlib.sha256()
    for folder in ("cuda", "metal"):
        for item in sorted(
            (resources.files("spec_kernels") / folder).iterdir(), key=lambda p: p.name
        ):
            digest.update(item.read_bytes())
    return digest.hexdigest()[:12]
