"""Matmul of 1 to 16 rows with a transposed weight, plain or quantised, reading the weight once.

`x @ W.T` as `verify_matmul_ops` (plain MLX), `verify_matmul_metal`, `verify_matmul_cuda` and the
dispatcher `verify_matmul`. Both kernels sum every output in an order that depends on the weight's
shape alone, so a row has the same bits whatever the number of rows beside it: the fast kernel and
the exact one are the same. Knows nothing about layers or models.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from spec_kernels._build import (
    Factory,
    Kernel,
    KernelError,
    Template,
    Text,
    backend,
    cuda_kernel,
    metal_kernel,
)

MAX_ROWS = 16
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
    """The kernel bound to one weight: everything but the rows is worked out once.

    Args:
        weight: the weight; must be supported on the backend.
        where: "metal" or "cuda".
        plan: the cut; chosen from the weight's shape if None.
        factory: makes Metal kernels; MLX's if None.

    Raises:
        KernelError: the backend's kernel cannot take this weight.
    """

    def __init__(
        self,
        weight: Weight,
        where: str,
        *,
        plan: Plan | None = None,
        factory: Factory | None = None,
    ) -> None:
        reason = unsupported(weight, where)
        if reason:
            raise KernelError(f"[verify_matmul] {reason[0].upper()}{reason[1:]}. Use stock MLX.")
        self.weight = weight
        self.dtype, self.k, self.n = weight.dtype, weight.k, weight.n
        if where == "cuda":
            self.plan = plan or cuda_plan(weight.n, weight.k, weight.bits, weight.group_size)
            self._tile_rows = 16
        else:
            self.plan = plan or metal_plan(weight.n, weight.k, weight.group_size)
            self._tile_rows = 8
        self.threads = 32 * self.plan.splits
        rows_of_group = self._tile_rows * self.plan.tiles
        self._grid = (-(-self.n // rows_of_group) * self.threads, 1, 1)
        empty = weight.w if weight.scales is None else weight.scales
        scales = weight.scales if weight.scales is not None else empty
        biases = weight.biases if weight.biases is not None else empty
        self._arrays = [weight.w, scales, biases]
        self._bound = [self._bind(rows, where, factory) for rows in (8, 16)]

    def _bind(self, rows: int, where: str, factory: Factory | None) -> tuple[Kernel, list]:
        template = _template(self.plan, self.weight, rows, cuda=where == "cuda")
        if where == "cuda":
            kernel = cuda_kernel(_TEXT, template, self.threads, self.plan.blocks)
        else:
            kernel = metal_kernel(_TEXT, factory)
        return kernel, list(template)

    def __call__(self, x: mx.array, *, poison: bool = False) -> mx.array:
        """Multiply at most 16 rows.

        Args:
            x: (..., K) in the weight's dtype, 1 to 16 rows in all.
            poison: fill the output with NaN first, so that an element never written shows.

        Returns:
            (..., N), same dtype.

        Raises:
            KernelError: too many rows, or another dtype or width.
        """
        shape = x.shape
        rows = x.size // self.k
        if shape[-1] != self.k or x.dtype != self.dtype or not 1 <= rows <= MAX_ROWS:
            raise KernelError(
                f"[verify_matmul] x must be 1 to {MAX_ROWS} rows of {self.k} values of "
                f"{self.dtype}, got shape {shape} of {x.dtype}. Use stock MLX."
            )
        kernel, template = self._bound[0 if rows <= 8 else 1]
        y = kernel(
            inputs=[x.reshape(rows, self.k), *self._arrays],
            template=template,
            grid=self._grid,
            threadgroup=(self.threads, 1, 1),
            output_shapes=[(rows, self.n)],
            output_dtypes=[self.dtype],
            **({"init_value": float("nan")} if poison else {}),
        )[0]
        return y.reshape(*shape[:-1], self.n)


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
    if rows > MAX_ROWS:
        return "stock", f"{rows} rows, the kernel takes {MAX_ROWS}"
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
