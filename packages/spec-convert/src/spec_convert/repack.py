"""Quantised GGUF blocks to MLX rows: the codes move, nothing is quantised again where it need not.

An affine row is one little-endian bit stream of unsigned codes with a scale and a bias per
group: value = scale * code + bias. For every layout marked exact, that formula computed in
float32 gives the numbers of the `gguf` package's own dequantisation (a zero may lose its sign).
The two block floating-point types keep their codes and scales as they are. Knows nothing about
tensor names, files or models.

The functions of `blocks.py` and `lattice.py` define every result. Where `_loop.c` was compiled at
installation, `repack` lets it do the common types in one pass, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from spec_convert.blocks import (
    unpack_iq4_nl,
    unpack_mxfp4,
    unpack_nvfp4,
    unpack_q3_k,
    unpack_q4_0,
    unpack_q4_1,
    unpack_q4_k,
    unpack_q5_0,
    unpack_q5_1,
    unpack_q5_k,
    unpack_q8_0,
    zero_point,
)
from spec_convert.errors import ConvertError
from spec_convert.lattice import on_lattice, rounded
from spec_convert.packing import Bytes

try:
    from spec_convert import _loop
except ImportError:  # installed without a compiler
    _loop = None

Floats = np.ndarray[Any, Any]
_HALF_INFINITY = 0x7C00
Parts = tuple[Bytes, Floats, Floats | None]
HAS_LOOP = _loop is not None
"""Whether the compiled loop is installed."""
IN_LOOP = frozenset(
    {Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.MXFP4}
)
"""Types that the compiled loop knows."""


class ScaleOverflowError(ArithmeticError):
    """A scale or bias is not exact in float16; the tensor needs float32 scales."""


@dataclass(frozen=True)
class Packed:
    """One chunk of rows in an MLX layout.

    Attributes:
        codes: packed codes, shape (rows, K * bits / 8), uint8; read as uint32 words by MLX.
        scales: shape (rows, K / group), float16, float32 or uint8.
        biases: same shape and dtype; None for block floating point.
    """

    codes: Bytes
    scales: Floats
    biases: Floats | None


@dataclass(frozen=True)
class Layout:
    """How a GGUF type is stored in MLX.

    Attributes:
        bits: width of a code.
        unpack: blocks, shape (n, block bytes), to codes, scales and biases; float scales may be
            given in float32 whatever they are stored in.
        group: values that share a scale.
        mode: MLX quantisation mode.
        wide: exact only with float32 scales.
        exact: every value is kept.
        zero: codes count from -2 ** zero, which makes the biases; None leaves them to `unpack`.
    """

    bits: int
    unpack: Callable[[Bytes], Parts]
    group: int = 32
    mode: str = "affine"
    wide: bool = False
    exact: bool = True
    zero: int | None = None


def repack(
    blocks: Bytes,
    kind: Kind,
    scale_dtype: np.dtype[Any],
    *,
    loose: bool = False,
    compiled: bool = HAS_LOOP,
) -> Packed:
    """Carry whole rows of quantised blocks over to their MLX layout.

    Args:
        blocks: raw rows, shape (rows, row bytes), uint8.
        kind: their GGUF type, one of `LAYOUTS`.
        scale_dtype: float16 or float32, the type of scales and biases; uint8 scales stay.
        loose: scales and biases may be rounded to `scale_dtype`.
        compiled: let the compiled loop do the types of `IN_LOOP`; the result is the same.

    Returns:
        The rows; scales are those of `Layout.unpack`, exactly unless `loose`.

    Raises:
        ScaleOverflowError: a scale or bias does not fit float16.
        ConvertError: a scale is infinite or not a number.
    """
    rows = blocks.shape[0]
    layout = LAYOUTS[kind]
    flat = blocks.reshape(-1, GGML_QUANT_SIZES[kind][1])
    parts = _in_one_pass(flat, kind, scale_dtype) if compiled and kind in IN_LOOP else None
    codes, scales, biases = parts or _in_numpy(flat, layout)
    if biases is None:
        return Packed(codes.reshape(rows, -1), scales.reshape(rows, -1), None)
    known = parts is not None or layout.zero is not None  # finite, and exact as they are
    if not (known and scales.dtype == biases.dtype == scale_dtype):
        exact = layout.wide and not loose
        scales, biases = (_narrow(part, scale_dtype, exact) for part in (scales, biases))
    return Packed(*(part.reshape(rows, -1) for part in (codes, scales, biases)))


def _in_one_pass(blocks: Bytes, kind: Kind, scale_dtype: np.dtype[Any]) -> Parts | None:
    """The compiled loop; None where a scale is no number or does not fit, which numpy reports."""
    assert _loop is not None
    layout = LAYOUTS[kind]
    n_values = GGML_QUANT_SIZES[kind][0]
    shape = len(blocks), n_values // layout.group
    codes = np.empty((len(blocks), n_values * layout.bits // 8), np.uint8)
    if layout.mode != "affine":
        scales = np.empty(shape, np.uint8)
        kept = _loop.repack(kind, np.ascontiguousarray(blocks), codes, scales)
        return (codes, scales, None) if kept else None
    scales = np.empty(shape, np.float32 if layout.wide else scale_dtype)
    biases = np.empty_like(scales)
    kept = _loop.repack(kind, np.ascontiguousarray(blocks), codes, scales, biases)
    return (codes, scales, biases) if kept else None


def _in_numpy(blocks: Bytes, layout: Layout) -> Parts:
    """The functions that define the result."""
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is reported by the caller
        codes, scales, biases = layout.unpack(blocks)
        if layout.zero is not None:
            biases = zero_point(scales, layout.zero)
    return codes, scales, biases


def _narrow(values: Floats, dtype: np.dtype[Any], check: bool) -> Floats:
    """Scales in their storage type; layouts that are not wide can only fail by overflow."""
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype, copy=False)
    if not _finite(narrow):
        if _finite(values):
            raise ScaleOverflowError
        raise ConvertError(
            "[repack] Scales must be finite numbers, got infinity or NaN. "
            "The file is damaged: download it again."
        )
    if check and not np.array_equal(narrow, values):
        raise ScaleOverflowError
    return narrow


def _finite(values: Floats) -> bool:
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    # numpy's own test converts float16 one by one.
    magnitudes = values.view(np.uint16) & np.uint16(0x7FFF)
    return int(magnitudes.max(initial=0)) < _HALF_INFINITY


LAYOUTS = {
    Kind.Q4_0: Layout(4, unpack_q4_0, zero=3),
    Kind.Q4_1: Layout(4, unpack_q4_1),
    Kind.Q5_0: Layout(5, unpack_q5_0, zero=4),
    Kind.Q5_1: Layout(5, unpack_q5_1),
    Kind.Q8_0: Layout(8, unpack_q8_0, zero=7),
    Kind.Q4_K: Layout(4, unpack_q4_k, wide=True),
    Kind.Q5_K: Layout(5, unpack_q5_k, wide=True),
    Kind.MXFP4: Layout(4, unpack_mxfp4, mode="mxfp4"),
    Kind.NVFP4: Layout(4, unpack_nvfp4, group=16, mode="nvfp4"),
    Kind.Q3_K: Layout(8, unpack_q3_k),
    Kind.IQ4_NL: Layout(8, unpack_iq4_nl),
    Kind.IQ4_XS: Layout(8, on_lattice(Kind.IQ4_XS, 8), wide=True),
    Kind.IQ3_XXS: Layout(8, on_lattice(Kind.IQ3_XXS, 8), wide=True),
    Kind.IQ3_S: Layout(4, on_lattice(Kind.IQ3_S, 4), wide=True),
    Kind.IQ2_XXS: Layout(8, on_lattice(Kind.IQ2_XXS, 8), wide=True),
    Kind.IQ1_S: Layout(2, on_lattice(Kind.IQ1_S, 2), wide=True),
    Kind.TQ1_0: Layout(2, on_lattice(Kind.TQ1_0, 2, group=128), group=128),
    Kind.TQ2_0: Layout(2, on_lattice(Kind.TQ2_0, 2, group=128), group=128),
    Kind.Q2_K: Layout(8, rounded(Kind.Q2_K), exact=False),
    Kind.Q6_K: Layout(8, rounded(Kind.Q6_K), exact=False),
    Kind.IQ2_XS: Layout(8, rounded(Kind.IQ2_XS), exact=False),
    Kind.IQ2_S: Layout(8, rounded(Kind.IQ2_S), exact=False),
    Kind.IQ1_M: Layout(8, rounded(Kind.IQ1_M), exact=False),
}
