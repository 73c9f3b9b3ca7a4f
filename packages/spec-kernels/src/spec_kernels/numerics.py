"""Whether a kernel computes what it should, on the device it runs on.

Against a float32 reference: ordinary data, all-negative scales, outliers, poisoned outputs, and
the same bits for a row whatever the rows beside it. Knows shapes; times nothing.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from spec_kernels._build import MAX_ROWS
from spec_kernels.attention import RowAttention, row_attention_ops, unsupported
from spec_kernels.matmul import RowMatmul, Weight, verify_matmul_ops

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
# A bias times a sum of inputs cancels against the codes: outliers cost a factor in every layout.
OUTLIER_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 4e-5}
ATTENTION_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True)
class MatmulShape:
    """A weight of `n` outputs and `k` inputs; 16 bits means not quantised; dtype of the inputs."""

    n: int
    k: int
    bits: int
    group_size: int
    dtype: str

    def __str__(self) -> str:
        kind = "dense" if self.bits == 16 else f"{self.bits}-bit g{self.group_size}"
        return f"{self.k}->{self.n} {kind} {self.dtype.removeprefix('mlx.core.')}"


@dataclass(frozen=True)
class AttentionShape:
    """Heads, heads of the cache, head dimension and dtype."""

    heads: int
    kv_heads: int
    depth: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.depth} {self.dtype}"


def random_weight(shape: MatmulShape, kind: str = "plain", seed: int = 0) -> Weight:
    """A weight of `shape`: "plain", "negative" (every scale below zero) or "outliers"."""
    dtype = DTYPES[shape.dtype.removeprefix("mlx.core.")]
    full = mx.random.normal((shape.n, shape.k), key=mx.random.key(seed)) * 0.05
    if kind == "negative":
        full = mx.abs(full) + 0.01
    if kind == "outliers":
        full = mx.where(mx.arange(shape.k) % 61 == 0, full * 100, full)
    full = full.astype(dtype)
    if shape.bits == 16:
        return Weight(full, None, None, 64, 16)
    w, scales, biases = mx.quantize(full, group_size=shape.group_size, bits=shape.bits)
    return Weight(w, scales, biases, shape.group_size, shape.bits)


def relative_error(got: mx.array, want: mx.array) -> float:
    """Largest difference over the largest reference value; NaN if any value is NaN."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return float(mx.abs(got - want).max() / mx.maximum(mx.abs(want).max(), 1e-30))


def matmul_problem(shape: MatmulShape, where: str, **build: Any) -> str | None:
    """What is wrong with the matmul kernel for `shape` on this device, or None.

    Args:
        shape: the shape.
        where: "metal" or "cuda".
        **build: passed on to `RowMatmul`.
    """
    dtype, most = shape.dtype.removeprefix("mlx.core."), MAX_ROWS[where]
    for kind in ("plain", "negative", "outliers"):
        limits = OUTLIER_TOLERANCE if kind == "outliers" else TOLERANCE
        weight = random_weight(shape, kind)
        matmul = RowMatmul(weight, where, **build)
        x = mx.random.normal((most, shape.k), key=mx.random.key(1)).astype(weight.dtype)
        if kind == "outliers":
            x = mx.where(mx.arange(shape.k) % 127 == 3, x * 50, x)
        want = verify_matmul_ops(x.astype(mx.float32), weight)
        full = matmul(x, poison=True)
        for rows in sorted({most, 17, 16, 9, 8, 1} & set(range(most + 1)), reverse=True):
            got = matmul(x[:rows], poison=True)
            error = relative_error(got, want[:rows])
            if not error <= limits[dtype]:
                return f"error {error:.1e} on {kind} data at {rows} rows"
            if not bool(mx.array_equal(got, full[:rows])):
                return f"rows are not independent at {rows} rows"
    return None


def attention_problem(shape: AttentionShape, where: str, **build: Any) -> str | None:
    """What is wrong with the attention kernel for `shape` on this device, or None."""
    dtype = DTYPES[shape.dtype]
    n_keys, scale, most = 333, shape.depth**-0.5, MAX_ROWS[where]
    q, k, v = (
        mx.random.normal((1, heads, length, shape.depth), key=mx.random.key(i)).astype(dtype)
        for i, (heads, length) in enumerate(
            ((shape.heads, most), (shape.kv_heads, n_keys), (shape.kv_heads, n_keys))
        )
    )
    reason = unsupported(q, k, "causal", where)
    if reason:
        return reason
    attend = RowAttention(scale, where, **build)
    full = attend(q, k, v, True)
    for queries in (1, 2, 5, 8, most // 2, most):
        part = q[:, :, -queries:]
        want = row_attention_ops(part.astype(mx.float32), k, v, scale=scale, mask="causal")
        got = attend(part, k, v, True)
        error = relative_error(got, want)
        if not error <= ATTENTION_TOLERANCE[shape.dtype]:
            return f"error {error:.1e} at {queries} query positions"
        until = n_keys - queries + 1
        alone = attend(q[:, :, -queries][:, :, None], k[:, :, :until], v[:, :, :until], True)
        if not bool(mx.array_equal(got, full[:, :, -queries:])) or not bool(
            mx.array_equal(alone[:, :, 0], full[:, :, -queries])
        ):
            return f"rows are not independent at {queries} query positions"
        if where == "cuda" and not bool(mx.array_equal(got, _in_a_buffer(attend, part, k, v))):
            return f"what lies behind the keys is not ignored at {queries} query positions"
    return None


def _in_a_buffer(attend: RowAttention, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """The same attention on buffers with room for more keys, which is full of NaN."""
    nothing = mx.full((*k.shape[:2], 300, k.shape[3]), float("nan"), k.dtype)
    k_buffer, v_buffer = (mx.concatenate([x, nothing], axis=2) for x in (k, v))
    n_keys = mx.array(k.shape[2], dtype=mx.int32)
    return attend.bound(q, k, causal=True)(q, k_buffer, v_buffer, n_keys)
