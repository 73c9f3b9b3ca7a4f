"""Bits of quantised codes, moved between the order of GGUF blocks and one stream per row.

Knows nothing about types, scales or tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Codes to a little-endian bit stream.

    Args:
        codes: shape (n, g), uint8, with g * bits a multiple of 8.
        bits: width of a code.

    Returns:
        Shape (n, g * bits / 8), uint8; value k is bits [k * bits, (k + 1) * bits).
    """
    if bits == 8:
        return codes
    if bits in (2, 4):
        return _join(codes, bits)
    planes = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(planes.reshape(len(codes), -1), axis=1, bitorder="little")


def _join(codes: Bytes, bits: int) -> Bytes:
    while bits < 8:
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(bits))
        bits *= 2
    return codes


def split_nibbles(quants: Bytes) -> Bytes:
    """One code a byte: first all low nibbles, then all high ones; shape (n, w) to (n, 2 w)."""
    return np.concatenate([quants & np.uint8(15), quants >> np.uint8(4)], axis=1)


def pair_nibbles(quants: Bytes) -> Bytes:
    """Low nibbles first and high nibbles second become neighbours in one stream.

    Args:
        quants: shape (n, w), w a multiple of 8; byte i holds values i (low) and w + i (high).

    Returns:
        Shape (n, w): byte i holds values 2 i (low) and 2 i + 1 (high).
    """
    words = np.ascontiguousarray(quants).view("<u8")  # (n, w / 8): 8 values in each half
    halves = np.empty((len(words), 2, words.shape[1]), "<u4")
    for index, shift in enumerate((0, 4)):
        half = (words >> np.uint64(shift)) & _LOW
        half |= half >> np.uint64(4)
        half &= np.uint64(0x00FF00FF00FF00FF)
        half |= half >> np.uint64(8)
        half &= np.uint64(0x0000FFFF0000FFFF)
        half |= half >> np.uint64(16)
        halves[:, index] = half.astype("<u4")
    return halves.reshape(len(words), -1).view(np.uint8)
