"""Quantised GGUF blocks to MLX affine rows: the codes move, nothing is quantised again.

An affine row is one little-endian bit stream of unsigned codes with a scale and a bias per
group: value = scale * code + bias. The layouts below give, computed in float32, exactly the
numbers of the `gguf` package's own dequantisation (a zero may lose its sign). Knows nothing
about tensor names, files or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from spec_convert.errors import ConvertError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, Any]
GROUP = 32


class ScaleOverflowError(ArithmeticError):
    """A scale or bias does not fit float16; the tensor needs float32 scales."""


@dataclass(frozen=True)
class Affine:
    """One chunk of rows in MLX affine layout.

    Attributes:
        codes: packed codes, shape (rows, K * bits / 8), uint8; read as uint32 words by MLX.
        scales: shape (rows, K / 32), float16 or float32.
        biases: same shape and dtype as `scales`.
    """

    codes: Bytes
    scales: Floats
    biases: Floats


@dataclass(frozen=True)
class Layout:
    """How a GGUF type is stored as affine groups of 32.

    Attributes:
        bits: width of a code.
        unpack: blocks, shape (n, block bytes), to codes, scales and biases in float32.
    """

    bits: int
    unpack: Callable[[Bytes], tuple[Bytes, Floats, Floats]]


def repack(blocks: Bytes, kind: Kind, scale_dtype: np.dtype[Any]) -> Affine:
    """Carry whole rows of quantised blocks over to the affine layout.

    Args:
        blocks: raw rows, shape (rows, row bytes), uint8.
        kind: their GGUF type, one of `LAYOUTS`.
        scale_dtype: float16 or float32, the type in which scales and biases are kept.

    Returns:
        The rows with scales and biases that are exact in `scale_dtype`.

    Raises:
        ScaleOverflowError: a scale or bias is not exact in float16.
        ConvertError: a scale is infinite or not a number.
    """
    rows = blocks.shape[0]
    layout = LAYOUTS[kind]
    codes, scales, biases = layout.unpack(blocks.reshape(-1, BLOCK_BYTES[kind]))
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ConvertError(
            "[repack] Scales must be finite numbers, got infinity or NaN. "
            "The file is damaged: download it again."
        )
    return Affine(
        codes.reshape(rows, -1),
        _narrow(scales, scale_dtype).reshape(rows, -1),
        _narrow(biases, scale_dtype).reshape(rows, -1),
    )


def _narrow(values: Floats, dtype: np.dtype[Any]) -> Floats:
    if dtype == values.dtype:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if not np.array_equal(narrow, values):
        raise ScaleOverflowError
    return narrow


def _half(column: Bytes) -> Floats:
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _pair_nibbles(quants: Bytes) -> Bytes:
    """Low nibbles are values 0-15 and high nibbles 16-31; MLX wants neighbours in one byte."""
    words = np.ascontiguousarray(quants).view("<u8")  # (n, 2): 8 values each half
    halves = np.empty((len(words), 2, 2), "<u4")
    for index, shift in enumerate((0, 4)):
        half = words >> np.uint64(shift) if shift else words
        half = half & np.uint64(0x0F0F0F0F0F0F0F0F)
        half |= half >> np.uint64(4)
        half &= np.uint64(0x00FF00FF00FF00FF)
        half |= half >> np.uint64(8)
        half &= np.uint64(0x0000FFFF0000FFFF)
        half |= half >> np.uint64(16)
        halves[:, index] = half.astype("<u4")
    return halves.reshape(len(words), 4).view(np.uint8)


def _pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Codes, shape (n, 32), to a little-endian bit stream, shape (n, 4 * bits)."""
    planes = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(planes.reshape(len(codes), -1), axis=1, bitorder="little")


def _five_bit_codes(quants: Bytes, high: Bytes) -> Bytes:
    low = np.concatenate([quants & 15, quants >> 4], axis=1)  # (n, 32)
    fifth = np.unpackbits(high, axis=1, bitorder="little") * np.uint8(16)
    return np.bitwise_or(low, fifth)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks[:, :2])
    return _pair_nibbles(blocks[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _pair_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks[:, :2])
    codes = _five_bit_codes(blocks[:, 6:], blocks[:, 2:6])
    return _pack_bits(codes, 5), scale, scale * np.float32(-16)


def _q5_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    codes = _five_bit_codes(blocks[:, 8:], blocks[:, 4:8])
    return _pack_bits(codes, 5), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks[:, :2])
    return blocks[:, 2:] ^ np.uint8(0x80), scale, scale * np.float32(-128)


BLOCK_BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q5_0: 22, Kind.Q5_1: 24, Kind.Q8_0: 34}
LAYOUTS = {
    Kind.Q4_0: Layout(4, _q4_0),
    Kind.Q4_1: Layout(4, _q4_1),
    Kind.Q5_0: Layout(5, _q5_0),
    Kind.Q5_1: Layout(5, _q5_1),
    Kind.Q8_0: Layout(8, _q8_0),
}
