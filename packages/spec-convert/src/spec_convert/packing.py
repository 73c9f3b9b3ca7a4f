"""Bits of quantised codes, moved between the order of GGUF blocks and one stream per row.

Everything runs over contiguous arrays in words of 16 bits or more; bytes leave and enter rows in
items of up to 32 bytes. Knows nothing about types, scales or tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Copies of such items between a contiguous and a strided array run at the speed of memory; numpy
# copies runs of other lengths, and between two strided arrays, one call at a time.
_ITEMS = {size: np.dtype((np.void, size)) for size in (1, 2, 4, 8, 16, 32)}


def cut(blocks: Bytes, start: int, size: int) -> Bytes:
    """Columns of all blocks; shape (n, block bytes) to (n, size), contiguous.

    Args:
        blocks: shape (n, block bytes), uint8, rows contiguous.
        start: first column.
        size: number of columns, a power of two up to 32.
    """
    items = np.empty((len(blocks), 1), _ITEMS[size])
    items[...] = blocks[:, start : start + size].view(_ITEMS[size])
    return items.view(np.uint8)


def put(target: Bytes, start: int, columns: Bytes) -> None:
    """Write columns into rows: the inverse of `cut`.

    Args:
        target: shape (n, row bytes), uint8, rows contiguous.
        start: first column to fill.
        columns: shape (n, size), uint8, contiguous; size a power of two up to 32.
    """
    size = columns.shape[1]
    target[:, start : start + size].view(_ITEMS[size])[...] = columns.view(_ITEMS[size])


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Codes to a little-endian bit stream.

    Args:
        codes: shape (n, g), uint8, contiguous, with g a multiple of 8.
        bits: width of a code.

    Returns:
        Shape (n, g * bits / 8), uint8; value k is bits [k * bits, (k + 1) * bits).
    """
    if bits == 8:
        return codes
    words = _close_ranks(codes, bits)
    if bits == 5 and codes.shape[1] % 32 == 0:
        return _join_forties(np.ascontiguousarray(words.reshape(-1, 4).T)).reshape(len(codes), -1)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(len(codes), -1)


def _close_ranks(codes: Bytes, bits: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Eight codes, one a byte, to the lowest 8 * bits bits of a word.

    Args:
        codes: shape (..., 8 n), uint8, contiguous.
        bits: width of a code, below 8.

    Returns:
        Shape (..., n), uint64.
    """
    for step, lane in ((1, "<u2"), (2, "<u4"), (4, "<u8")):
        # Two fields a lane: low + upper << (8 step) becomes low + upper << (bits step).
        fields = codes.view(lane)
        upper = fields >> fields.dtype.type(8 * step)
        upper *= fields.dtype.type((1 << 8 * step) - (1 << bits * step))
        codes = np.subtract(fields, upper, out=upper).view(np.uint8)
    return codes.view("<u8")


def five_bits(first: Bytes, second: Bytes, mask: Bytes) -> Bytes:
    """Low four bits and a mask of fifth bits of 32 codes to one stream of 5-bit codes.

    Args:
        first: shape (n, 8), contiguous; byte i holds codes i (low nibble) and 16 + i (high).
        second: shape (n, 8), contiguous; byte i holds codes 8 + i and 24 + i.
        mask: shape (n, 4); bit i of byte k belongs to code 8 k + i.

    Returns:
        Shape (n, 20), uint8.
    """
    # Eight codes of all blocks at a time, shape (4, n, 8): everything below is contiguous.
    masks = np.ascontiguousarray(mask.T)
    codes = np.unpackbits(masks.reshape(-1), bitorder="little").reshape(4, -1, 8)
    words = codes.view("<u8")
    words <<= np.uint64(4)
    for index, half in enumerate((first, second)):
        codes[index] |= half & np.uint8(15)
        codes[index + 2] |= half >> np.uint8(4)
    return _join_forties(_close_ranks(codes, 5)[..., 0])


def _join_forties(words: np.ndarray[Any, np.dtype[np.uint64]]) -> Bytes:
    """Four 40-bit words to 20 bytes; shape (4, n) to (n, 20). The words are overwritten."""
    first, second, third, fourth = words
    stream = np.empty((words.shape[1], 20), np.uint8)
    low = second << np.uint64(40)
    low |= first
    put(stream, 0, low.view(np.uint8).reshape(-1, 8))
    second >>= np.uint64(24)
    third <<= np.uint64(16)
    third |= second
    third |= fourth << np.uint64(56)
    put(stream, 8, third.view(np.uint8).reshape(-1, 8))
    fourth >>= np.uint64(8)
    put(stream, 16, fourth.astype("<u4").view(np.uint8).reshape(-1, 4))
    return stream


def split_nibbles(quants: Bytes) -> Bytes:
    """One code a byte: first all low nibbles, then all high ones; shape (n, w) to (n, 2 w)."""
    return np.concatenate([quants & np.uint8(15), quants >> np.uint8(4)], axis=1)


def pair_nibbles(quants: Bytes) -> Bytes:
    """Low nibbles first and high nibbles second become neighbours in one stream.

    Args:
        quants: shape (n, w), w 8, 16 or 32, contiguous; byte i holds values i (low) and w + i
            (high).

    Returns:
        Shape (n, w): byte i holds values 2 i (low) and 2 i + 1 (high).
    """
    n_rows, width = quants.shape
    pairs = quants.reshape(-1).view("<u2")
    # The two nibbles in the middle of each 16 bits change places.
    swapped = pairs >> np.uint16(4)
    swapped ^= pairs
    swapped &= np.uint16(0x00F0)
    swapped *= np.uint16(0x0011)
    swapped ^= pairs
    packed = np.empty((n_rows, width), np.uint8)
    put(packed, 0, swapped.astype(np.uint8).reshape(n_rows, -1))
    swapped >>= np.uint16(8)
    put(packed, width // 2, swapped.astype(np.uint8).reshape(n_rows, -1))
    return packed
