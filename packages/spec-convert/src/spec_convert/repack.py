"""Quantised GGUF blocks to MLX rows: the codes move, nothing is quantised again where it need not.

An affine row is one little-endian bit stream of unsigned codes with a scale and a bias per
group: value = scale * code + bias. For every layout marked exact, that formula computed in
float32 gives the numbers of the `gguf` package's own dequantisation (a zero may lose its sign).
The two block floating-point types keep their codes and scales as they are. Knows nothing about
tensor names, files or models.
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

Floats = np.ndarray[Any, Any]
_HALF_INFINITY = 0x7C00
Parts = tuple[Bytes, Floats, Floats | None]


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


def repack(blocks: Bytes, kind: Kind, scale_dtype: np.dtype[Any], *, loose: bool = False) -> Packed:
    """Carry whole rows of quantised blocks over to their MLX layout.

    Args:
        blocks: raw rows, shape (rows, row bytes), uint8.
        kind: their GGUF type, one of `LAYOUTS`.
        scale_dtype: float16 or float32, the type of scales and biases; uint8 scales stay.
        loose: scales and biases may be rounded to `scale_dtype`.

    Returns:
        The rows; scales are those of `Layout.unpack`, exactly unless `loose`.

    Raises:
        ScaleOverflowError: a scale or bias does not fit float16.
        ConvertError: a scale is infinite or not a number.
    """
    rows = blocks.shape[0]
    layout = LAYOUTS[kind]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale is reported below
        codes, scales, biases = layout.unpack(blocks.reshape(-1, GGML_QUANT_SIZES[kind][1]))
        if layout.zero is not None:
            biases = zero_point(scales, layout.zero)
    if biases is None:
        return Packed(codes.reshape(rows, -1), scales.reshape(rows, -1), None)
    if layout.zero is not None and biases.dtype == scale_dtype == np.float16:  # finite, like scales
        return Packed(codes.reshape(rows, -1), scales.reshape(rows, -1), biases.reshape(rows, -1))
    exact = layout.wide and not loose
    return Packed(
        codes.reshape(rows, -1),
        _narrow(scales, scale_dtype, exact).reshape(rows, -1),
        _narrow(biases, scale_dtype, exact).reshape(rows, -1),
    )


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
