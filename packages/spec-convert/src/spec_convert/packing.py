"""Bits of quantised codes, moved between the order of GGUF blocks and one stream per row.

Knows nothing about types, scales or tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


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
    words = np.ascontiguousarray(codes).view("<u8")  # 8 codes each
    for step in (1, 2, 4):
        # Neighbouring fields close ranks: the upper one moves down to the end of the lower one.
        width = step * bits
        low = sum(((1 << width) - 1) << place for place in range(0, 64, 16 * step))
        upper = (words >> np.uint64(8 * step - width)) & np.uint64(low << width)
        words = (words & np.uint64(low)) | upper
    stream = words.astype("<u8", copy=False).view(np.uint8).reshape(*words.shape, 8)
    return stream[..., :bits].reshape(len(codes), -1)


def five_bits(nibbles: Bytes, mask: Bytes) -> Bytes:
    """Low four bits of 32 codes and a mask of fifth bits, to one stream of 5-bit codes.

    Args:
        nibbles: shape (n, 16), neighbours paired as `pair_nibbles` returns them.
        mask: shape (n, 4); bit i of byte k belongs to code 8 k + i.

    Returns:
        Shape (n, 20), uint8.
    """
    # One word for each 8 codes, words of one place in all rows together: shape (4, n).
    words = nibbles.view("<u4").T.astype(np.uint64)
    for width, gap, places in ((16, 4, (0,)), (8, 2, (0, 20)), (4, 1, (0, 10, 20, 30))):
        # The upper half of every field moves up to make room for fifth bits.
        low = sum(((1 << width) - 1) << place for place in places)
        upper = (words & np.uint64(low << width)) << np.uint64(gap)
        words &= np.uint64(low)
        words |= upper
    words |= _FIFTH_BITS[mask.T]
    stream = np.empty((len(nibbles), 5), "<u4")
    for index in range(5):
        # Word k holds bits [40 k, 40 k + 40) of the stream; column index wants 32 of them.
        first = max(0, index - 1)
        shift = 32 * index - 40 * first
        column = words[first] >> np.uint64(shift)
        if shift > 8 and first < 3:
            column |= words[first + 1] << np.uint64(40 - shift)
        stream[:, index] = column.astype(np.uint32)
    return stream.view(np.uint8)


_FIFTH_BITS = np.array(
    [sum(1 << (5 * bit + 4) for bit in range(8) if byte >> bit & 1) for byte in range(256)],
    np.uint64,
)


def split_nibbles(quants: Bytes) -> Bytes:
    """One code a byte: first all low nibbles, then all high ones; shape (n, w) to (n, 2 w)."""
    return np.concatenate([quants & np.uint8(15), quants >> np.uint8(4)], axis=1)


def pair_nibbles(quants: Bytes) -> Bytes:
    """Low nibbles first and high nibbles second become neighbours in one stream.

    Args:
        quants: shape (n, w), w a multiple of 8, rows contiguous; byte i holds values i (low) and
            w + i (high).

    Returns:
        Shape (n, w): byte i holds values 2 i (low) and 2 i + 1 (high).
    """
    n_rows, width = quants.shape
    pairs = np.ascontiguousarray(quants.view("<u2")).reshape(-1)
    packed = np.empty((n_rows, 2, width // 2), np.uint8)
    # Moving whole words into place is several times faster than moving bytes.
    word = "<u8" if width % 16 == 0 else "<u4"
    places = packed.view(word)
    for half, nibbles in enumerate((pairs, pairs >> np.uint16(4))):
        low = nibbles & np.uint16(0x0F0F)
        low |= low >> np.uint16(4)
        neighbours = low.astype(np.uint8)  # the upper byte of each pair is dropped
        places[:, half] = neighbours.view(word).reshape(n_rows, -1)
    return packed.reshape(n_rows, width)
