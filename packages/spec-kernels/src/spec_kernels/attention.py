"""Attention of a few query positions to a long cache, reading keys and values once for all.

`row_attention_ops` (plain MLX), `row_attention_metal`, `row_attention_cuda` and the dispatcher
`row_attention`. Flash decoding in two passes: blocks of keys, then a merge. The blocks are fixed
ranges of positions, so a query has the same bits whatever the number of queries beside it and
however long the cache has become. Knows nothing about caches or models.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx

from spec_kernels._build import (
    MAX_ROWS,
    Factory,
    KernelError,
    Text,
    backend,
    cuda_kernel,
    metal_kernel,
)

NEAR, FAR, SHIFT = 128, 256, 2048
Choice = Literal["auto", "ops", "stock", "metal", "cuda"]
Mask = Literal["causal"] | None
Attend = Callable[..., mx.array]

_WAYS = 4
_PASS = Text(
    "row_attention",
    ("q", "k", "v", "scale", "n_keys"),
    ("o", "o_top", "o_mass"),
    header="row_attention_header",
    row_contiguous=False,
)
_FRESH_PASS = Text(
    "row_attention",
    ("q", "k", "v", "scale", "n_keys", "k_new", "v_new"),
    ("o", "o_top", "o_mass"),
    header="row_attention_header",
    row_contiguous=False,
)
_NOTHING_NEW = """  auto k_new = k, v_new = v;
  auto k_new_strides = k_strides, v_new_strides = v_strides;
"""
_METAL_PASS = Text(
    "row_attention",
    ("q", "k", "v", "scale", "shape_of"),
    ("o", "o_top", "o_mass"),
    row_contiguous=False,
)
_MERGE = Text("row_attention_merge", ("o", "o_top", "o_mass", "dims"), ("y",))


def n_chunks(n_keys: int) -> int:
    """Blocks of keys that `n_keys` positions fall into: NEAR each up to SHIFT, FAR each beyond."""
    if n_keys <= SHIFT:
        return -(-n_keys // NEAR)
    return SHIFT // NEAR + -(-(n_keys - SHIFT) // FAR)


def unsupported(q: mx.array, k: mx.array, mask: object, where: str) -> str | None:
    """Why the kernel of backend `where` cannot take these arguments, or None if it can."""
    n_queries, depth = q.shape[-2:]
    if mask is not None and not (isinstance(mask, str) and mask == "causal"):
        return "only the causal mask or none is served"
    if not 1 <= n_queries <= min(MAX_ROWS[where], k.shape[2]):
        return f"{n_queries} query positions, served are 1 to {MAX_ROWS[where]}"
    depths = (64, 96, 128) if where == "cuda" else (64, 80, 96, 128)
    if depth not in depths:
        return f"head dimension {depth}, served are {depths}"
    if q.dtype not in (mx.float16, mx.bfloat16) or k.dtype != q.dtype:
        return f"dtypes {q.dtype} and {k.dtype}, served are two alike of 16 bits"
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads must be a multiple of the {k.shape[1]} heads of the cache"
    return None


def _require(q: mx.array, k: mx.array, mask: object, where: str) -> None:
    reason = unsupported(q, k, mask, where)
    if reason:
        raise KernelError(f"[row_attention] {reason[0].upper()}{reason[1:]}. Use stock MLX.")


def row_attention_ops(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask = None
) -> mx.array:
    """Reference in float32.

    Args:
        q: (B, HQ, QL, D), the newest QL positions.
        k: (B, HK, L, D), HQ a multiple of HK.
        v: (B, HK, L, D).
        scale: factor on the scores.
        mask: "causal": query i sees the keys up to L - QL + i. None: every key.

    Returns:
        (B, HQ, QL, D) in the dtype of `q`.
    """
    batch, heads, n_queries, depth = q.shape
    kv_heads, n_keys = k.shape[1], k.shape[2]
    grouped = q.astype(mx.float32).reshape(batch, kv_heads, heads // kv_heads, n_queries, depth)
    scores = scale * (grouped @ k.astype(mx.float32)[:, :, None].swapaxes(-1, -2))
    if mask == "causal":
        last = mx.arange(n_keys - n_queries, n_keys)[:, None]
        scores = mx.where(mx.arange(n_keys)[None] <= last, scores, -mx.inf)
    out = mx.softmax(scores, axis=-1) @ v.astype(mx.float32)[:, :, None]
    return out.reshape(q.shape).astype(q.dtype)


def few_query_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask | mx.array = None
) -> mx.array:
    """Attention in plain operations, in the inputs' own dtype, with the softmax in float32.

    For a few queries on a CUDA device where no kernel applies: MLX hands those to cuDNN there,
    which builds a plan for every length of the cache, so that each round of a growing text pays for
    a new one.

    Args:
        q: (B, HQ, QL, D), the newest QL positions.
        k: (B, HK, L, D), HQ a multiple of HK.
        v: (B, HK, L, D).
        scale: factor on the scores.
        mask: as `mx.fast.scaled_dot_product_attention` takes it.

    Returns:
        (B, HQ, QL, D) in the dtype of `q`.
    """
    batch, heads, n_queries, depth = q.shape
    kv_heads, n_keys = k.shape[1], k.shape[2]
    grouped = (q * scale).reshape(batch, kv_heads, -1, depth)
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(batch, kv_heads, -1, n_queries, n_keys)
    if isinstance(mask, str):
        last = mx.arange(n_keys - n_queries, n_keys)[:, None]
        scores = mx.where(mx.arange(n_keys)[None] <= last, scores, -mx.inf)
    elif mask is not None:
        if mask.ndim > 2:  # (B or 1, HQ or 1, QL, L), heads by group
            groups = (1, 1) if mask.shape[-3] == 1 else (kv_heads, heads // kv_heads)
            mask = mask.reshape(*mask.shape[:-3], *groups, *mask.shape[-2:])
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True)
    out = weights.reshape(batch, kv_heads, -1, n_keys).astype(v.dtype) @ v
    return out.reshape(q.shape).astype(q.dtype)


def _row_tiles(n_rows: int, tile: int) -> tuple[int, int]:
    """Tiles of a block (at most 64 rows) and blocks that `n_rows` rows need."""
    tiles = min(64 // tile, -(-n_rows // tile))
    return tiles, -(-n_rows // (tiles * tile))


class RowAttention:
    """The kernels for one scale: what a call need not work out again.

    Args:
        scale: factor on the scores.
        where: "metal" or "cuda".
        factory: makes Metal kernels; MLX's if None.
    """

    def __init__(self, scale: float, where: str, factory: Factory | None = None) -> None:
        self._scale = mx.array([scale], dtype=mx.float32)
        self._where, self._factory = where, factory
        self._bound: dict[tuple, Attend] = {}

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, causal: bool) -> mx.array:
        """Attend. Arguments and result as `row_attention_ops`; they must be supported."""
        return self.bound(q, k, causal)(q, k, v)

    def bound(self, q: mx.array, k: mx.array, causal: bool) -> Attend:
        """The launches for queries and a cache like these, whatever the cache's length.

        On CUDA they take more: how many keys each sequence has, int32 (B,), at the start of buffers
        with room for more (without it as many as `k` is long); and the newest keys and values,
        (B, HK, QL, D) each, where the buffers do not have them yet.
        """
        causal = causal or q.shape[2] == 1  # one query sees every key anyway
        key = (q.shape, k.shape[1], q.dtype, causal)
        attend = self._bound.get(key)
        if attend is None:
            if self._where == "cuda":
                attend = _CudaAttend(*key, self._scale)
            else:
                attend = functools.partial(self._metal, causal=causal)
            self._bound[key] = attend
        return attend

    def _metal(self, q: mx.array, k: mx.array, v: mx.array, causal: bool) -> mx.array:
        batch, heads, n_queries, depth = q.shape
        kv_heads, n_keys = k.shape[1], k.shape[2]
        n_rows = heads // kv_heads * n_queries
        tiles, groups = _row_tiles(n_rows, 8)
        padded = 8 * tiles * groups
        rows = mx.contiguous(q).reshape(batch, kv_heads, n_rows, depth)
        if padded != n_rows:
            rows = mx.pad(rows, [(0, 0), (0, 0), (0, padded - n_rows), (0, 0)])
        chunks, heads_in_all, threads = n_chunks(n_keys), batch * kv_heads, 32 * tiles
        partials = metal_kernel(_METAL_PASS, self._factory)(
            inputs=[rows, k, v, self._scale, _ints(n_queries, groups)],
            template=_template(q.dtype, depth, "NSG", tiles, causal),
            grid=(kv_heads * threads, chunks * groups, batch),
            threadgroup=(threads, 1, 1),
            output_shapes=_partial_shapes(heads_in_all, chunks, padded, depth),
            output_dtypes=[mx.float32] * 3,
        )
        merged = metal_kernel(_MERGE, self._factory)(
            inputs=[*partials, _ints(n_queries, kv_heads)],
            template=[("T", q.dtype)],
            grid=(depth, n_rows, heads_in_all),
            threadgroup=(depth, 1, 1),
            output_shapes=[(batch, n_queries, heads, depth)],
            output_dtypes=[q.dtype],
        )[0]
        return merged.transpose(0, 2, 1, 3)


class _CudaAttend:
    """The CUDA launches for one shape of queries: all but the number of keys is worked out once."""

    def __init__(
        self, shape: tuple[int, ...], kv_heads: int, dtype: mx.Dtype, causal: bool, scale: mx.array
    ) -> None:
        batch, heads, n_queries, self._depth = shape
        self._rows, self._heads = heads // kv_heads * n_queries, batch * kv_heads
        self._scale = scale
        tiles, groups = _row_tiles(self._rows, 16)
        tiles = 4 if tiles == 3 else tiles  # one compilation less, for some idle lanes
        threads = 128 * tiles
        template = _template(dtype, self._depth, "RT", tiles, causal)
        shared = 2 * (2 * 128 * (self._depth + 8) + 16 * tiles * (128 + 8))
        held, fresh = ((*template, ("FRESH", new)) for new in (False, True))
        self._attend = cuda_kernel(_PASS, held, threads, 1, shared, _NOTHING_NEW)
        self._attend_fresh = cuda_kernel(_FRESH_PASS, fresh, threads, 1, shared)
        self._threads, self._grid = threads, (kv_heads * groups, batch)
        merge = (("T", dtype), ("D", self._depth), ("WAYS", _WAYS))
        self._merge = cuda_kernel(_MERGE, merge, self._depth * _WAYS)
        self._merging: dict[str, Any] = {
            "grid": (self._rows * self._depth, self._heads * _WAYS, 1),
            "threadgroup": (self._depth, _WAYS, 1),
            "output_shapes": [(batch, n_queries, heads, self._depth)],
            "output_dtypes": [dtype],
        }
        self._dims = _ints(n_queries, kv_heads)
        self._attending: dict[int, dict[str, Any]] = {}

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        n_keys: mx.array | None = None,
        fresh: tuple[mx.array, ...] = (),
    ) -> mx.array:
        if n_keys is None:
            n_keys = _lengths(k.shape[2], q.shape[0])
        chunks = n_chunks(k.shape[2])  # buffers have room for the fresh ones
        attending = self._attending.get(chunks)
        if attending is None:
            attending = self._attending[chunks] = {
                "grid": (chunks * self._threads, *self._grid),
                "threadgroup": (self._threads, 1, 1),
                "output_shapes": _partial_shapes(self._heads, chunks, self._rows, self._depth),
                "output_dtypes": [mx.float32] * 3,
            }
        attend = self._attend_fresh if fresh else self._attend
        partials = attend(inputs=[q, k, v, self._scale, n_keys, *fresh], **attending)
        return self._merge(inputs=[*partials, self._dims], **self._merging)[0].transpose(0, 2, 1, 3)


def _template(
    dtype: mx.Dtype, depth: int, rows_name: str, tiles: int, causal: bool
) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("D", depth),
        (rows_name, tiles),
        ("NEAR", NEAR),
        ("FAR", FAR),
        ("SHIFT", SHIFT),
        ("CAUSAL", causal),
    ]


@functools.cache
def _ints(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


@functools.lru_cache(maxsize=4)
def _lengths(n_keys: int, batch: int) -> mx.array:
    """One array for all layers of a forward."""
    return mx.array([n_keys] * batch, dtype=mx.int32)


def _partial_shapes(heads: int, chunks: int, rows: int, depth: int) -> Sequence[tuple[int, ...]]:
    return [(heads, chunks, rows, depth), (heads, chunks, rows), (heads, chunks, rows)]


def row_attention_metal(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    factory: Factory | None = None,
) -> mx.array:
    """The Metal kernels. Arguments and result as `row_attention_ops`; k and v may be strided views.

    Raises:
        KernelError: the kernels cannot take these arguments.
    """
    _require(q, k, mask, "metal")
    return RowAttention(scale, "metal", factory)(q, k, v, mask == "causal")


def row_attention_cuda(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask = None
) -> mx.array:
    """The CUDA kernels. Arguments and result as `row_attention_ops`; k and v may be strided views.

    Raises:
        KernelError: the kernels cannot take these arguments.
    """
    _require(q, k, mask, "cuda")
    return RowAttention(scale, "cuda")(q, k, v, mask == "causal")


def choose(q: mx.array, k: mx.array, mask: object, kernel: Choice = "auto") -> tuple[str, str]:
    """Which implementation `row_attention` would take, and why: (choice, reason)."""
    if kernel != "auto":
        return kernel, "asked for"
    where = backend()
    if where == "cpu":
        return "stock", "no kernel for the CPU"
    reason = unsupported(q, k, mask, where)
    return ("stock", reason) if reason else (where, "supported")


def row_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    kernel: Choice = "auto",
) -> tuple[mx.array, tuple[str, str]]:
    """Attention as `row_attention_ops`, and which implementation computed it, with the reason."""
    choice = choose(q, k, mask, kernel)
    if choice[0] == "metal":
        return row_attention_metal(q, k, v, scale=scale, mask=mask), choice
    if choice[0] == "cuda":
        return row_attention_cuda(q, k, v, scale=scale, mask=mask), choice
    if choice[0] == "ops":
        return row_attention_ops(q, k, v, scale=scale, mask=mask), choice
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask), choice
