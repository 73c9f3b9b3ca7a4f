"""Affine groups for GGUF types whose own codes MLX cannot hold.

Most of them still place the values of a group on an evenly spaced lattice: every value is a whole
multiple of a unit that follows from the block's scale. Where the lattice has few enough points
the group is exact; the remaining types share a group of 32 between two sub-blocks of 16 and are
rounded to 256 levels between the group's extremes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from spec_convert.blocks import half, q6_k_values
from spec_convert.packing import Bytes, pack_bits

Floats = np.ndarray[Any, Any]
Unpack = Callable[[Bytes], tuple[Bytes, Floats, Floats]]
_LEVELS = 256
_MAX_HALF = 32_000

# Byte position of the block's float16 scale, and the fraction of it that all values share.
_UNITS = {
    Kind.IQ4_XS: (0, 1.0),
    Kind.IQ3_XXS: (0, 0.25),
    Kind.IQ3_S: (0, 1.0),
    Kind.IQ2_XXS: (0, 0.125),
    Kind.IQ1_S: (0, 0.125),
    Kind.TQ1_0: (52, 1.0),
    Kind.TQ2_0: (64, 1.0),
}


def on_lattice(kind: Kind, bits: int, group: int = 32) -> Unpack:
    """Unpacker for a type whose groups always fit a lattice of 2 ** bits points.

    Args:
        kind: the GGUF type.
        bits: width of a code.
        group: values that share a scale.

    Returns:
        A function from blocks to packed codes, scales and biases, exact in float32.
    """
    position, fraction = _UNITS[kind]

    def unpack(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
        values = quants.dequantize(np.ascontiguousarray(blocks), kind)
        unit = half(blocks[:, position : position + 2]) * np.float32(fraction)  # (n, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            steps = np.where(unit == 0, 0, np.rint(values / unit.astype(np.float64)))
        if not np.isfinite(steps).all():  # reported by the caller, with the scales
            steps[:] = 0
        steps = steps.astype(np.int32).reshape(-1, group)
        units = np.repeat(unit, values.shape[1] // group, axis=0)
        codes, width, low = _fit(steps)
        if codes.max(initial=0) >> bits:
            raise AssertionError(f"{kind.name} left its lattice")
        packed = pack_bits(codes.astype(np.uint8), bits)
        return packed, units * width.astype(np.float32), units * low.astype(np.float32)

    return unpack


def _fit(steps: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Whole numbers, shape (n, g), as width * code + low with the widest step that fits."""
    low = steps.min(axis=1, keepdims=True)
    rest = steps - low
    width = np.maximum(np.gcd.reduce(rest, axis=1, keepdims=True), 1)
    return rest // width, width, low


def rounded(kind: Kind) -> Unpack:
    """Unpacker to 8-bit codes between the extremes of each 32 values.

    Scale and bias are float16 where the values allow it. The bias is at most the smallest value
    and the scale large enough to reach the greatest, so no value is off by more than half a
    scale, and a scale is at most 1/255 of the group's span but for its own rounding.

    Args:
        kind: the GGUF type.

    Returns:
        A function from blocks to packed codes, scales and biases.
    """

    def unpack(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
        if kind is Kind.Q6_K:
            return _round_groups(q6_k_values(blocks))
        values = quants.dequantize(np.ascontiguousarray(blocks), kind)
        return _round_groups(values.reshape(-1, 32))

    return unpack


def _round_groups(values: Floats) -> tuple[Bytes, Floats, Floats]:
    least = values.min(axis=1, keepdims=True).astype(np.float64)
    greatest = values.max(axis=1, keepdims=True).astype(np.float64)
    largest = max(-least.min(initial=0), greatest.max(initial=0))
    dtype = np.float16 if largest < _MAX_HALF else np.float32
    bias = _toward(least, dtype, -np.inf)
    scale = _toward((greatest - bias) / (_LEVELS - 1), dtype, np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        inverse = np.where(scale == 0, 0, 1 / scale).astype(np.float32)
        codes = np.subtract(values, bias, dtype=np.float32)
        codes *= inverse
        np.rint(codes, out=codes)
        np.clip(codes, 0, _LEVELS - 1, out=codes)
        return codes.astype(np.uint8), scale.astype(np.float32), bias.astype(np.float32)


def _toward(exact: Floats, dtype: type[np.floating[Any]], direction: float) -> Floats:
    """Round float64 to `dtype` towards minus or plus infinity; the result is float64."""
    near = exact.astype(dtype)
    wrong = near > exact if direction < 0 else near < exact
    return np.where(wrong, np.nextafter(near, dtype(direction)), near).astype(np.float64)
