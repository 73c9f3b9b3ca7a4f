"""A call like mx.fast.metal_kernel's, run on CPU fibers.

Buffers end at a protected page, outputs start as NaN, and the launch happens in a forked child, so
a bad kernel cannot take the process down. Knows how to lay out buffers; the rules of a GPU are in
the runtime.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metal_emulator.build import DEFAULT_CACHE, compile_kernel
from metal_emulator.errors import EmulatorError
from metal_emulator.rewrite import rewrite_threadgroup
from metal_emulator.signature import Call, Generated, generate

MAX_THREADS = 1024
_MESSAGE_BYTES = 1 << 17
_NUMPY = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.float32: np.float32,
}


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        check: instrument every access: races, bounds, writes to inputs, bytes requested per buffer.
        order: of threadgroups, simdgroups and lanes: 0 ascending, 1 descending, 2 shuffled.
        seed: of order 2.
        strict: a collective must be reached by every lane of its simdgroup.
        sum_order: reduction tree of simd_sum and its kin: 0, 1 or 2.
        flush_denormals: as a GPU does for float32.
        processes: 0 means one per processor, one with `check`.
        optimise: level of -O.
        threadgroup_limit: bytes of threadgroup memory.
        preamble: text compiled before the kernel, such as includes of MLX's own headers.
        cache: folder of compiled objects.
    """

    check: bool = False
    order: int = 0
    seed: int = 0
    strict: bool = True
    sum_order: int = 0
    flush_denormals: bool = True
    processes: int = 0
    optimise: int = 2
    threadgroup_limit: int = 32768
    preamble: str = ""
    cache: Path = DEFAULT_CACHE


@dataclass
class Report:
    """What the last launch did.

    Attributes:
        seconds: of the launch, without compiling.
        collectives: operations performed by whole simdgroups.
        mma: matrix multiplications among them.
        barriers: threadgroup barriers.
        threadgroups: threadgroups run.
        threadgroup_bytes: threadgroup memory of one threadgroup.
        traffic: with `check`, bytes (read, written) by name of the array.
    """

    seconds: float = 0.0
    collectives: int = 0
    mma: int = 0
    barriers: int = 0
    threadgroups: int = 0
    threadgroup_bytes: int = 0
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)


_last = Report()


def last_report() -> Report:
    """The report of the launch that finished last."""
    return _last


class _Stats(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("coll", "mma", "barriers", "sgbarriers")),
        *((name, ctypes.c_uint64) for name in ("groups", "tgmem", "simdloads")),
        ("rd", ctypes.c_uint64 * 32),
        ("wr", ctypes.c_uint64 * 32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("buf", ctypes.POINTER(ctypes.c_void_p)),
        ("size", ctypes.POINTER(ctypes.c_uint64)),
        ("out", ctypes.POINTER(ctypes.c_int)),
        ("nbuf", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("tg", ctypes.c_uint * 3),
        *((name, ctypes.c_int) for name in ("nproc", "order", "strict", "sum_order")),
        *((name, ctypes.c_int) for name in ("ftz", "check", "seed", "maxgroups")),
        ("stack_kb", ctypes.c_uint64),
        ("tg_limit", ctypes.c_uint64),
        ("msg", ctypes.c_char_p),
        ("msgcap", ctypes.c_int),
        ("st", ctypes.POINTER(_Stats)),
    ]


def _to_numpy(array: mx.array) -> np.ndarray:
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        return np.asarray((array if array.ndim else array.reshape(1)).view(mx.uint16))
    return np.asarray(array)


def _to_mlx(raw: np.ndarray, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(raw.view(np.uint16)).view(mx.bfloat16).reshape(shape)
    return mx.array(raw.view(_NUMPY[dtype])).reshape(shape)


class _Buffers:
    """The buffers of one launch, in the order of the function's parameters."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.pointers: list[int] = []
        self.sizes: list[int] = []
        self.writable: list[int] = []

    def add(self, data: np.ndarray, *, writable: bool = False) -> int:
        nbytes = data.nbytes
        pointer = self._library.emu_alloc(max(nbytes, 1))
        if nbytes:
            ctypes.memmove(pointer, data.ctypes.data, nbytes)
        self.pointers.append(pointer)
        self.sizes.append(nbytes)
        self.writable.append(int(writable))
        return pointer

    def free(self) -> None:
        for pointer, nbytes in zip(self.pointers, self.sizes, strict=True):
            self._library.emu_free(pointer, max(nbytes, 1))


def _laid_out(array: mx.array, row_contiguous: bool) -> tuple[np.ndarray, list[int]]:
    """The bytes of an input and its strides in elements; a view keeps its strides if it may."""
    data = _to_numpy(array)
    if row_contiguous or data.flags.c_contiguous or min(data.strides, default=0) < 0:
        data = np.ascontiguousarray(data)
        return data, [stride // data.itemsize for stride in data.strides]
    reach = zip(data.shape, data.strides, strict=True)
    span = sum((size - 1) * stride for size, stride in reach) + data.itemsize
    strides = [stride // data.itemsize for stride in data.strides]
    return np.frombuffer(ctypes.string_at(data.ctypes.data, span), np.uint8), strides


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object | None = None,
    options: Options | None = None,
) -> Callable[..., list[mx.array]]:
    """A kernel with the arguments of `mx.fast.metal_kernel`, run here.

    Args:
        name: of the kernel.
        input_names: of its inputs.
        output_names: of its outputs.
        source: body of the function.
        header: text before it.
        ensure_row_contiguous: whether strided inputs are copied first.
        atomic_outputs: whether outputs are atomic.
        compile_options: accepted for compatibility; the math mode changes nothing here.
        options: the emulator's own; a call may override them.

    Returns:
        A callable with MLX's keyword arguments, and `options`.

    Raises:
        ValueError: as MLX raises it.
        EmulatorError: from the call: the kernel does not compile, or was caught at a bug.
    """
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    usual = options or Options()

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object | None = None,
        options: Options | None = None,
    ) -> list[mx.array]:
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        _same_length(arrays, input_names, "inputs")
        _same_length(output_shapes, output_names, "output_shapes")
        _same_length(output_dtypes, output_names, "output_dtypes")
        if threadgroup[0] * threadgroup[1] * threadgroup[2] > MAX_THREADS:
            raise ValueError(
                "Thread group size is greater than the maximum allowed threads per threadgroup "
                f"({MAX_THREADS})."
            )
        described = Call(
            name, header, source, input_names, arrays, output_names, output_dtypes,
            template or (), atomic_outputs,
        )  # fmt: skip
        job = _Job(described, ensure_row_contiguous, options or usual, init_value)
        return job.run([tuple(shape) for shape in output_shapes], grid, threadgroup)

    return call


def _same_length(given: Sequence, names: Sequence[str], what: str) -> None:
    if len(given) != len(names):
        raise ValueError(
            f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(given)}."
        )


def _program(generated: Generated, options: Options) -> str:
    entry = 'extern "C" __attribute__((visibility("default"))) void emu_entry(void** b)'
    called = f"{generated.function}{generated.arguments}({', '.join(generated.parameters)})"
    return (
        f"using namespace metal;\n{options.preamble}\n"
        f'#line 1 "kernel.metal"\n{rewrite_threadgroup(generated.body)}\n'
        f'#line 1 "launcher"\n{entry} {{ {called}; }}\n'
    )


class _Job:
    def __init__(
        self, call: Call, row_contiguous: bool, options: Options, init_value: float | None
    ) -> None:
        self._call, self._options = call, options
        self._row_contiguous, self._init_value = row_contiguous, init_value
        self._generated = generate(call)
        self._library = compile_kernel(
            _program(self._generated, options),
            call.name,
            options.cache,
            options.optimise,
            options.check,
        )

    def run(
        self,
        shapes: Sequence[tuple[int, ...]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        buffers = _Buffers(self._library)
        try:
            outputs = self._fill(buffers, shapes)
            self._launch(buffers, grid, threadgroup)
            return [self._read(*output) for output in outputs]
        finally:
            buffers.free()

    def _fill(
        self, buffers: _Buffers, shapes: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, mx.Dtype, tuple[int, ...]]]:
        inputs, outputs = self._call.inputs, []
        laid_out = [_laid_out(array, self._row_contiguous) for array in inputs]
        for kind, index in self._generated.buffers:
            if kind == "in":
                buffers.add(laid_out[index][0])
            elif kind == "shape":
                buffers.add(np.array(inputs[index].shape, np.int32))
            elif kind == "strides":
                buffers.add(np.array(laid_out[index][1], np.int64))
            elif kind == "ndim":
                buffers.add(np.array([inputs[index].ndim], np.int32))
            else:
                dtype, shape = self._call.output_dtypes[index], shapes[index]
                pointer = buffers.add(self._fresh(dtype, shape), writable=True)
                outputs.append((pointer, dtype, shape))
        return outputs

    def _fresh(self, dtype: mx.Dtype, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape)) if shape else 1
        if self._init_value is None:
            return np.full(size * dtype.size, 0xFF, np.uint8)  # NaN in every float type
        return _to_numpy(mx.full((size,), self._init_value, dtype=dtype))

    def _read(self, pointer: int, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
        nbytes = (int(np.prod(shape)) if shape else 1) * dtype.size
        raw = np.frombuffer(ctypes.string_at(pointer, nbytes), np.uint8)
        return _to_mlx(raw, dtype, shape)

    def _launch(
        self, buffers: _Buffers, grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
    ) -> None:
        global _last
        options, count = self._options, len(buffers.pointers)
        message, stats = ctypes.create_string_buffer(_MESSAGE_BYTES), _Stats()
        launch = _Launch(
            entry=ctypes.cast(self._library.emu_entry, ctypes.c_void_p).value,
            args=(ctypes.c_void_p * count)(*buffers.pointers),
            buf=(ctypes.c_void_p * count)(*buffers.pointers),
            size=(ctypes.c_uint64 * count)(*buffers.sizes),
            out=(ctypes.c_int * count)(*buffers.writable),
            nbuf=count,
            grid=(ctypes.c_uint * 3)(*grid),
            tg=(ctypes.c_uint * 3)(*map(min, threadgroup, grid)),
            nproc=options.processes or (1 if options.check else os.cpu_count() or 1),
            order=options.order,
            strict=int(options.strict),
            sum_order=options.sum_order,
            ftz=int(options.flush_denormals),
            check=int(options.check),
            seed=options.seed,
            stack_kb=256,
            tg_limit=options.threadgroup_limit,
            msg=ctypes.cast(message, ctypes.c_char_p),
            msgcap=_MESSAGE_BYTES,
            st=ctypes.pointer(stats),
        )
        start = time.perf_counter()
        failed = self._library.emu_launch(ctypes.byref(launch))
        _last = self._report(stats, time.perf_counter() - start)
        if failed:
            text = message.value.decode(errors="replace")
            raise EmulatorError(f"[{self._call.name}] The kernel was caught:\n{text}")

    def _report(self, stats: _Stats, seconds: float) -> Report:
        report = Report(seconds, stats.coll, stats.mma, stats.barriers, stats.groups, stats.tgmem)
        if self._options.check:
            names = {"in": self._call.input_names, "out": self._call.output_names}
            for slot, (kind, index) in enumerate(self._generated.buffers):
                if kind in names:
                    report.traffic[names[kind][index]] = (stats.rd[slot], stats.wr[slot])
        return replace(report)
