"""Kernel texts, and the callables MLX makes of them.

A text is compiled once per process and specialisation. MLX's CUDA backend finds a compiled kernel
by its name alone, also on disk, so every CUDA name here carries a digest of all that went into it.
Knows nothing about any one operation.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, cast

import mlx.core as mx

Backend = Literal["metal", "cuda", "cpu"]
Kernel = Callable[..., Any]
Factory = Callable[..., Kernel]
Template = tuple[tuple[str, Any], ...]


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


@functools.cache
def cuda_kernel(
    text: Text, template: Template, threads: int, blocks: int = 1, shared: int = 0
) -> Kernel:
    """The CUDA kernel of `text` for one specialisation.

    Args:
        text: the kernel.
        template: names and values of its compile-time constants; part of the compiled name.
        threads: threads of a block, which bounds the registers of each.
        blocks: blocks that must fit on a multiprocessor at once.
        shared: bytes of dynamic shared memory of a block.
    """
    header = read_text("cuda", f"{text.header}.cu") if text.header else ""
    header += (
        "\n#undef __global__\n#define __global__ __attribute__((global)) "
        f"__launch_bounds__({threads}, {blocks})\n"
    )
    source = read_text("cuda", f"{text.name}.cu")
    digest = hashlib.sha256("\0".join((header, source, repr(template))).encode()).hexdigest()[:12]
    make = cast(Factory, mx.fast.cuda_kernel)
    return make(
        name=f"spec_{text.name}_{digest}",
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=source,
        header=header,
        ensure_row_contiguous=text.row_contiguous,
        shared_memory=shared,
    )


def revision() -> str:
    """Digest of every kernel text of this package: part of the key of a stored verdict."""
    digest = hashlib.sha256()
    for folder in ("cuda", "metal"):
        for item in sorted(
            (resources.files("spec_kernels") / folder).iterdir(), key=lambda p: p.name
        ):
            digest.update(item.read_bytes())
    return digest.hexdigest()[:12]
