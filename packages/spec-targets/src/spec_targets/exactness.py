"""Does a row's result depend on how many rows ride along? Measured on the model's own layers.

Exact mode needs every op of a verify to give a row the same bits at any width. Whether it does is a
property of backend, library and shape, so it is tried on this machine: each distinct linear layer
and the attention of each distinct cache, 1 row against 2..17; then the model itself, whose experts,
convolutions and recurrences have no shape of their own to try.
"""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from spec_core import Target

_BLOCKS = (2, 5, 9, 17)
_WIDTHS = (2, 3, 4, 5, 6, 8, 9, 12, 16, 17)
_LENGTHS = (60, 1100, 4200)  # both sides of the points where Metal and CUDA change kernels


def find_inexact_op(model: nn.Module, entries: list[Any], n_heads: int) -> str | None:
    """The first op found whose rows depend on their number, or None.

    Args:
        model: The loaded model.
        entries: Cache entries after a forward, to learn the shapes of keys.
        n_heads: Query heads of an attention layer.
    """
    tried: set[tuple[Any, ...]] = set()
    for name, module in model.named_modules():
        shape = _linear_shape(module)
        if shape is None or shape in tried:
            continue
        tried.add(shape)
        width = _first_difference(module, shape)
        if width is not None:
            return f'{shape[0]} {shape[1]}x{shape[2]} ("{name}") at {width} rows'
    return _attention_difference(entries, n_heads)


def find_inexact_width(target: Target, most: int | None = None) -> str | None:
    """The first block width at which the model's own rows differ from single steps, or None.

    Args:
        target: The loaded target.
        most: Most rows a block may have; None for no limit.
    """
    rng = random.Random(0)
    n_prompt = 40
    ids = [rng.randrange(target.vocab_size) for _ in range(n_prompt + max(_BLOCKS))]
    steps, wide = target.make_cache(), target.make_cache()
    for cache in (steps, wide):
        target.prefill(ids[:n_prompt], cache)
    want: list[mx.array] = []
    for token in ids[n_prompt:]:
        want.append(target.verify(mx.array([token], mx.int32), steps).logits)
        target.commit(steps, 1)
        mx.eval(want[-1])
    for width in _BLOCKS if most is None else sorted({min(n, most) for n in _BLOCKS}):
        block = mx.array(ids[n_prompt : n_prompt + width], mx.int32)
        logits = target.verify(block, wide).logits
        target.commit(wide, 0)
        if not _equal(logits, mx.concatenate(want[:width])):
            return f"the model's own forward at {width} rows"
    return None


def _linear_shape(module: Any) -> tuple[Any, ...] | None:
    """(kind, inputs, outputs, dtype, bits, group) of a layer that multiplies rows by weights."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        weight, bits, group = module.weight, module.bits, module.group_size
        kind = f"{bits}-bit quantized_matmul"
        return (kind, weight.shape[1] * 32 // bits, weight.shape[0], module.scales.dtype, group)
    if isinstance(module, nn.Linear | nn.Embedding):
        weight = module.weight
        return ("matmul", weight.shape[1], weight.shape[0], weight.dtype, 0)
    return None


def _first_difference(module: Any, shape: tuple[Any, ...]) -> int | None:
    """The smallest width at which the first row's bits change, or None."""
    is_table = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    apply = module.as_linear if is_table else module
    x = mx.random.normal((max(_WIDTHS), shape[1]), key=mx.random.key(0)).astype(shape[3])
    want = mx.concatenate([apply(x[i : i + 1]) for i in (0, 1)])
    for width in _WIDTHS:
        if not _equal(apply(x[:width])[:2], want):
            return width
    return None


def _attention_difference(entries: list[Any], n_heads: int) -> str | None:
    """The same for attention over caches of several lengths, at the model's own head counts."""
    tried: set[tuple[Any, ...]] = set()
    for entry in entries:
        shape = _attention_shape(entry)
        if shape is None or shape in tried:
            continue
        tried.add(shape)
        for length in _LENGTHS:
            width = _attention_width(n_heads, *shape, length)
            if width is not None:
                n_kv, head_dim, _, bits, _ = shape
                packed = f" in {bits} bits" if bits else ""
                return (
                    f"attention of {n_heads}/{n_kv} heads of {head_dim}{packed} over {length} "
                    f"rows at {width} rows"
                )
    return None


def _attention_shape(entry: Any) -> tuple[int, int, mx.Dtype, int, int] | None:
    """(key heads, channels, dtype, bits, group) of an entry with keys; bits 0 for unpacked."""
    if isinstance(entry, QuantizedKVCache):
        if entry.keys is None:
            return None
        packed, scales, _ = entry.keys
        channels = packed.shape[-1] * 32 // entry.bits
        return packed.shape[1], channels, scales.dtype, entry.bits, entry.group_size
    keys = getattr(entry, "keys", None)
    if not isinstance(keys, mx.array):
        return None
    return keys.shape[1], keys.shape[3], keys.dtype, 0, 0


def _attention_width(
    n_heads: int, n_kv: int, head_dim: int, dtype: mx.Dtype, bits: int, group: int, length: int
) -> int | None:
    """The smallest width at which the first row's attention changes its bits, or None."""
    widest = max(_WIDTHS)
    if n_heads % n_kv:
        n_heads = n_kv  # layers of one model may differ in their heads
    q, k, v = (
        mx.random.normal((1, heads, rows, head_dim), key=mx.random.key(i)).astype(dtype)
        for i, (heads, rows) in enumerate(
            ((n_heads, widest), (n_kv, length + widest), (n_kv, length + widest))
        )
    )

    def attend(width: int) -> mx.array:
        entry: Any = QuantizedKVCache(group, bits) if bits else KVCache()
        rows = length + width
        keys, values = entry.update_and_fetch(k[:, :, :rows], v[:, :, :rows])
        mask: Any = "causal" if width > 1 else None
        out = scaled_dot_product_attention(
            q[:, :, :width], keys, values, entry, scale=head_dim**-0.5, mask=mask
        )
        return out[:, :, 0]

    want = attend(1)
    return next((w for w in _WIDTHS if not _equal(attend(w), want)), None)


def _equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())  # sync: a measurement, once per model
