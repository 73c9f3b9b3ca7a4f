"""Matmul of a few rows with a transposed weight, plain or quantised.

`x @ W.T` as `verify_matmul_ops` (plain MLX), `verify_matmul_metal`, `verify_matmul_cuda` and the
dispatcher `verify_matmul`. Up to 16 rows read the weight once; on CUDA up to 32 are served, which
read it twice. Both kernels sum every output in an order that depends on the weight's shape alone,
so a row has the same bits whatever the number of rows beside it: the fast kernel and the exact one
are the same. Knows nothing about layers or models.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from spec_kernels._build import (
    MAX_ROWS,
    CudaKernel,
    Factory,
    Kernel,
    KernelError,
    Template,
    Text,
    backend,
    cuda_kernel,
    metal_kernel,
)

ONCE = 16  # rows that one pass over the weight serves
MAX_SIBLINGS = 3
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
Choice = Literal["auto", "ops", "stock", "metal", "cuda"]

_TEXT = Text("verify_matmul", ("x", "w", "scales", "biases"), ("y",), header="verify_matmul_header")


@dataclass(frozen=True)
class Weight:
    """A weight of shape (N, K) as MLX stores it.

    Attributes:
        w: packed uint32, (N, K * bits / 32); or, with bits 16, the (N, K) matrix itself.
        scales: (N, K / group_size), or None with bits 16.
        biases: same shape as scales, or None with bits 16.
        group_size: values that share a scale; 64 with bits 16.
        bits: 2, 3, 4, 5, 6 or 8, or 16 for a matrix that is not quantised.
    """

    w: mx.array
    scales: mx.array | None
    biases: mx.array | None
    group_size: int
    bits: int

    @property
    def n(self) -> int:
        """Output features."""
        return self.w.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.w.shape[1] if self.bits == 16 else self.w.shape[1] * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the inputs this weight is meant for."""
        return self.w.dtype if self.scales is None else self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight must move."""
        return self.w.nbytes + sum(a.nbytes for a in (self.scales, self.biases) if a is not None)


@dataclass(frozen=True)
class Plan:
    """How a kernel cuts up one weight. A function of the weight's shape, never of the rows.

    Attributes:
        tiles: tiles of weight rows (8 on Metal, 16 on CUDA) of a simdgroup or warp.
        splits: simdgroups or warps that share K.
        slab: quantisation groups a CUDA warp loads at once; 1 on Metal.
        blocks: CUDA blocks wanted on a multiprocessor at once.
    """

    tiles: int
    splits: int
    slab: int = 1
    blocks: int = 1


def unsupported(weight: Weight, where: str) -> str | None:
    """Why the kernel of backend `where` cannot take `weight`, or None if it can."""
    if weight.w.ndim != 2:
        return f"weight must be a matrix, got {weight.w.ndim} axes"
    if weight.bits != 16 and weight.biases is None:
        return "only affine quantisation is supported"
    if weight.bits not in (*BITS, 16) or (weight.bits == 16 and where == "metal"):
        return f"bits must be one of {BITS}, got {weight.bits}"
    if weight.group_size not in GROUPS or weight.k % weight.group_size:
        return f"input size {weight.k} must be a multiple of a group of 32, 64 or 128"
    dtypes = [mx.float16, mx.bfloat16] + ([mx.float32] if where == "metal" else [])
    if weight.dtype not in dtypes:
        return f"dtype {weight.dtype} is not served on {where}"
    return None


def _divisor(groups: int, candidates: tuple[int, ...]) -> int:
    return next(c for c in candidates if groups % c == 0)


def cuda_plan(n: int, k: int, bits: int, group_size: int) -> Plan:
    """Cut for CUDA, measured on an H200: 16 weight rows a block, at most 8 warps along K."""
    groups = k // group_size
    if bits == 16 or group_size == 128:
        slab = _divisor(groups, (2, 1))
        return Plan(1, min(8, groups // slab), slab, 3 if bits == 16 else 1)
    slab = _divisor(groups, (4, 3, 2, 1))
    return Plan(1, min(8, groups // slab), slab, 2 if bits in (4, 8) else 1)


def metal_plan(n: int, k: int, group_size: int) -> Plan:
    """Cut for Metal: at most 8 simdgroups, because the M1 and M2 refuse larger groups."""
    tiles = 4 if n >= 2048 else 2 if n >= 512 else 1
    return Plan(tiles, min(8, k // group_size))


def _template(plan: Plan, weight: Weight, rows: int, *, cuda: bool) -> Template:
    common = (
        ("T", weight.dtype),
        ("BITS", weight.bits),
        ("GS", weight.group_size),
        ("NT", plan.tiles),
        ("RT", 1 if rows <= 8 else 2),
        ("S", plan.splits),
    )
    return (*common, ("ST", weight.dtype), ("GPS", plan.slab)) if cuda else common


def verify_matmul_ops(x: mx.array, weight: Weight) -> mx.array:
    """Reference: dequantise in float32 and multiply in float32.

    Args:
        x: (..., K), any float dtype.
        weight: the (N, K) weight.

    Returns:
        (..., N) in the dtype of `x`.
    """
    if weight.scales is None or weight.biases is None:
        full = weight.w.astype(mx.float32)
    else:
        full = mx.dequantize(
            weight.w,
            weight.scales.astype(mx.float32),
            weight.biases.astype(mx.float32),
            group_size=weight.group_size,
            bits=weight.bits,
        )
    return (x.astype(mx.float32) @ full.T).astype(x.dtype)


def stock_matmul(x: mx.array, weight: Weight) -> mx.array:
    """What MLX itself does with `x` (..., K) and `weight`: (..., N)."""
    if weight.scales is None:
        return x @ weight.w.T
    return mx.quantized_matmul(
        x,
        weight.w,
        weight.scales,
        weight.biases,
        transpose=True,
        group_size=weight.group_size,
        bits=weight.bits,
    )


class RowMatmul:
    """The kernel bound to weights that share their input: all but the rows is worked out once.

    Args:
        weights: one weight, or on CUDA up to `MAX_SIBLINGS` alike in all but N, computed in one
        launch.
        where: "metal" or "cuda".
        plan: the cut; chosen from the weights' shape if None.
        factory: makes Metal kernels; MLX's if None.

    Raises:
        KernelError: the backend's kernel cannot take these weights.
    """

    def __init__(
        self,
        weights: Weight | Sequence[Weight],
        where: str,
        *,
        plan: Plan | None = None,
        factory: Factory | None = None,
    ) -> None:
        self.weights = (weights,) if isinstance(weights, Weight) else tuple(weights)
        first = self.weights[0]
        reason = next((r for w in self.weights if (r := unsupported(w, where))), None)
        if reason:
            raise KernelError(f"[verify_matmul] {reason[0].upper()}{reason[1:]}. Use stock MLX.")
        if len(self.weights) > (MAX_SIBLINGS if where == "cuda" else 1) or not alike(self.weights):
            raise KernelError(
                f"[verify_matmul] Weights of one launch must be at most {MAX_SIBLINGS} on CUDA, "
                f"alike in all but their outputs, got {len(self.weights)}. Launch them one by one."
            )
        self.dtype, self.k, self.n = first.dtype, first.k, first.n
        if where == "cuda":
            self.plan = plan or cuda_plan(first.n, first.k, first.bits, first.group_size)
        else:
            self.plan = plan or metal_plan(first.n, first.k, first.group_size)
        threads = 32 * self.plan.splits
        tile = self.plan.tiles * (16 if where == "cuda" else 8)
        self._max_rows, self._width = MAX_ROWS[where], sum(-(-w.n // tile) for w in self.weights)
        self._threadgroup = (threads, 1, 1)
        self._arrays = [array for weight in self.weights for array in _arrays(weight)]
        self._outputs = [weight.n for weight in self.weights]
        self._dtypes = [self.dtype] * len(self.weights)
        bind = self._cuda if where == "cuda" else functools.partial(self._metal, factory)
        self._kernels = (bind(8), bind(16))
        self._calls: dict[tuple[int, ...], Kernel] = {}

    @property
    def weight(self) -> Weight:
        """The first weight."""
        return self.weights[0]

    def _metal(self, factory: Factory | None, rows: int) -> Kernel:
        template = list(_template(self.plan, self.weight, rows, cuda=False))
        return functools.partial(metal_kernel(_TEXT, factory), template=template)

    def _cuda(self, rows: int) -> Kernel:
        constants = _template(self.plan, self.weight, rows, cuda=True)
        count, threads = len(self.weights), self._threadgroup[0]
        prelude = _prelude(count)
        return cuda_kernel(_siblings_text(count), constants, threads, self.plan.blocks, 0, prelude)

    def launch(self, x: mx.array, *, poison: bool = False) -> list[mx.array]:
        """Multiply a few rows by every weight.

        Args:
            x: (..., K) in the weights' dtype, at most as many rows in all as the backend serves.
            poison: fill the outputs with NaN first, so that an element never written shows.

        Returns:
            (..., N) for each weight, same dtype.

        Raises:
            KernelError: too many rows, or another dtype or width.
        """
        if x.dtype != self.dtype:
            raise KernelError(f"[verify_matmul] x must be {self.dtype}, got {x.dtype}.")
        call, _ = self.bound(x.shape)
        return call(x, init_value=float("nan")) if poison else call(x)

    def bound(self, shape: tuple[int, ...]) -> tuple[Kernel, bool]:
        """The bare launch for inputs of one shape, which must be of the weights' dtype.

        Returns:
            The launch, from x to a product per weight, and whether it is final: the first launches
            of a kernel settle what MLX compiles (see `CudaKernel`).

        Raises:
            KernelError: too many rows, or another width.
        """
        call = self._calls.get(shape)
        if call is not None:
            return call, True
        rows = math.prod(shape[:-1])
        if shape[-1] != self.k or not 1 <= rows <= self._max_rows:
            raise KernelError(
                f"[verify_matmul] x must be 1 to {self._max_rows} rows of {self.k} values, got "
                f"shape {shape}. Use stock MLX."
            )
        kernel = self._kernels[0 if rows <= 8 else 1]
        final = not isinstance(kernel, CudaKernel) or kernel.settled
        launch = functools.partial(
            kernel.kernel if isinstance(kernel, CudaKernel) and final else kernel,
            grid=(self._width * self._threadgroup[0], -(-rows // ONCE), 1),
            threadgroup=self._threadgroup,
            output_shapes=[(*shape[:-1], n) for n in self._outputs],
            output_dtypes=self._dtypes,
        )
        arrays = self._arrays

        def call(x: mx.array, **others: Any) -> list[mx.array]:
            return launch(inputs=[x, *arrays], **others)

        if final:
            self._calls[shape] = call
        return call, final

    def __call__(self, x: mx.array, *, poison: bool = False) -> mx.array:
        """The product with the first weight; arguments and errors of `launch`."""
        return self.launch(x, poison=poison)[0]


def alike(weights: Sequence[Weight]) -> bool:
    """Whether the weights differ in nothing but N, so that one launch can serve them."""
    first = weights[0]
    return all(
        (w.k, w.bits, w.group_size, w.dtype) == (first.k, first.bits, first.group_size, first.dtype)
        for w in weights
    )


def _arrays(weight: Weight) -> list[mx.array]:
    scales = weight.w if weight.scales is None else weight.scales
    biases = weight.w if weight.biases is None else weight.biases
    return [weight.w, scales, biases]


@functools.cache
def _siblings_text(count: int) -> Text:
    inputs = [f"{name}{i}" for i in range(count) for name in ("w", "scales", "biases")]
    outputs = tuple(f"y{i}" for i in range(count))
    return Text("verify_matmul", ("x", *inputs), outputs, header="verify_matmul_header")


def _prelude(count: int) -> str:
    """CUDA lines that pick this block's weight: blocks of w0 come first, then those of w1, ..."""
    text = "  int tile = blockIdx.x, N = w0_shape[0];\n"
    text += "  auto w = w0; auto scales = scales0; auto biases = biases0; auto y = y0;\n"
    for i in range(1, count):
        text += (
            f"  if (tile >= (N + 16 * NT - 1) / (16 * NT) && w == w{i - 1}) {{\n"
            f"    tile -= (N + 16 * NT - 1) / (16 * NT);\n"
            f"    N = w{i}_shape[0], w = w{i}, scales = scales{i}, biases = biases{i}, y = y{i};\n"
            "  }\n"
        )
    return text


def verify_matmul_metal(
    x: mx.array,
    weight: Weight,
    *,
    plan: Plan | None = None,
    factory: Factory | None = None,
) -> mx.array:
    """`x @ W.T` by the Metal kernel; see `RowMatmul` for the arguments and errors."""
    return RowMatmul(weight, "metal", plan=plan, factory=factory)(x)


def verify_matmul_cuda(x: mx.array, weight: Weight, *, plan: Plan | None = None) -> mx.array:
    """`x @ W.T` by the CUDA kernel; see `RowMatmul` for the arguments and errors."""
    return RowMatmul(weight, "cuda", plan=plan)(x)


def choose(x: mx.array, weight: Weight, kernel: Choice = "auto") -> tuple[str, str]:
    """Which implementation `verify_matmul` would take, and why.

    Args:
        x: (..., K).
        weight: the (N, K) weight.
        kernel: what the caller asked for.

    Returns:
        ("metal" | "cuda" | "stock" | "ops", reason).
    """
    if kernel != "auto":
        return kernel, "asked for"
    where = backend()
    if where == "cpu":
        return "stock", "no kernel for the CPU"
    rows = x.size // x.shape[-1]
    if rows > MAX_ROWS[where]:
        return "stock", f"{rows} rows, the kernel takes {MAX_ROWS[where]}"
    if x.dtype != weight.dtype:
        return "stock", f"input of {x.dtype} with a weight for {weight.dtype}"
    reason = unsupported(weight, where)
    return ("stock", reason) if reason else (where, "supported")


def verify_matmul(
    x: mx.array, weight: Weight, *, kernel: Choice = "auto"
) -> tuple[mx.array, tuple[str, str]]:
    """`x @ W.T`, and which implementation computed it.

    Args:
        x: (..., K).
        weight: the (N, K) weight.
        kernel: "auto" takes the backend's kernel where it applies, else stock MLX.

    Returns:
        (..., N) and (choice, reason) as `choose` gives them.
    """
    choice = choose(x, weight, kernel)
    if choice[0] == "metal":
        return verify_matmul_metal(x, weight), choice
    if choice[0] == "cuda":
        return verify_matmul_cuda(x, weight), choice
    return (verify_matmul_ops if choice[0] == "ops" else stock_matmul)(x, weight), choice
