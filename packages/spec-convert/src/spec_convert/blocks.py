"""Blocks of the GGUF types whose codes MLX can hold as they are.

Every function takes blocks, shape (n, block bytes), uint8, and returns packed codes, scales and
biases with one row per block; no biases where they follow from the scales. Knows nothing about
tensors or files.

References:
    Block layouts: ggml's `ggml-common.h`, as documented by the `gguf` package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import quants

from spec_convert.errors import ConvertError
from spec_convert.packing import Bytes, cut, five_bits, pack_bits, pair_nibbles, split_nibbles

Floats = np.ndarray[Any, Any]
_NAN_E4M3 = 0x7F
_NAN_E8M0 = 0xFF


def half(column: Bytes) -> Floats:
    """Two-byte columns as float16 numbers in float32; shape (n, 2 m) to (n, m)."""
    return _stored_half(column).astype(np.float32)


def _stored_half(column: Bytes) -> Floats:
    """Two-byte columns as the float16 numbers they are; shape (n, 2 m) to (n, m)."""
    return column.view("<u2").copy().view("<f2")


def zero_point(scale: Floats, power: int) -> Floats:
    """-scale * 2 ** power for float16 scales, without converting them where none is extreme.

    Returns:
        float16, finite, with the exponent raised and the sign turned; float32 when a scale is 0,
        subnormal, no number, or too large for that.
    """
    bits = scale.view(np.uint16)
    exponents = bits - np.uint16(1 << 10)  # 0 becomes the largest
    exponents &= np.uint16(0x7C00)
    if exponents.max(initial=0) < (30 - power) << 10:
        return (bits + np.uint16(0x8000 + (power << 10))).view("<f2")
    return scale.astype(np.float32) * np.float32(-(1 << power))


def unpack_q4_0(blocks: Bytes) -> tuple[Bytes, Floats, None]:
    """D * (q - 8)."""
    return pair_nibbles(cut(blocks, 2, 16)), _stored_half(blocks[:, :2]), None


def unpack_q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """D * q + m."""
    codes = pair_nibbles(cut(blocks, 4, 16))
    return codes, _stored_half(blocks[:, :2]), _stored_half(blocks[:, 2:4])


def unpack_q5_0(blocks: Bytes) -> tuple[Bytes, Floats, None]:
    """D * (q - 16); the fifth bits are a 32-bit mask."""
    codes = five_bits(cut(blocks, 6, 8), cut(blocks, 14, 8), blocks[:, 2:6])
    return codes, _stored_half(blocks[:, :2]), None


def unpack_q5_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """D * q + m; the fifth bits are a 32-bit mask."""
    codes = five_bits(cut(blocks, 8, 8), cut(blocks, 16, 8), blocks[:, 4:8])
    return codes, _stored_half(blocks[:, :2]), _stored_half(blocks[:, 2:4])


def unpack_q8_0(blocks: Bytes) -> tuple[Bytes, Floats, None]:
    """D * q with q signed."""
    codes = cut(blocks, 2, 32)
    words = codes.view("<u8")
    words ^= np.uint64(0x8080808080808080)
    return codes, _stored_half(blocks[:, :2]), None


def unpack_q3_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """D * (s - 32) * (q - 4), s for each 16 of 256 values: whole multiples of d from -128 to 128.

    Two sub-blocks share a group of 32, so the products become the codes. They span at most 252
    steps; a group that reaches 128 is counted from there downwards.
    """
    steps = _q3_k_steps(blocks)
    down = steps.max(axis=1, keepdims=True) > 127
    codes = np.where(down, 128 - steps, steps + 128).astype(np.uint8)
    scale = np.repeat(half(blocks[:, 108:110]), 8, axis=0)
    scale = np.where(down, -scale, scale)
    return codes, scale, scale * np.float32(-128)


def _q3_k_steps(blocks: Bytes) -> np.ndarray[Any, Any]:
    n = len(blocks)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    low = (blocks[:, 32:96].reshape(n, 2, 1, 32) >> shifts) & np.uint8(3)  # (n, 2, 4, 32)
    planes = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, :32] >> planes) & np.uint8(1)  # (n, 8, 32)
    codes = low.reshape(n, 8, 32).astype(np.int16) + 4 * high.astype(np.int16) - 4
    nibbles = split_nibbles(cut(blocks, 96, 8))  # (n, 16)
    tops = (blocks[:, 104:108].reshape(n, 1, 4) >> shifts) & np.uint8(3)
    scales = (nibbles | (tops.reshape(n, 16) << np.uint8(4))).astype(np.int16) - 32
    return (codes.reshape(n, 16, 16) * scales[:, :, None]).reshape(-1, 32)


def q6_k_values(blocks: Bytes) -> Floats:
    """D * s * (q - 32), s for each 16 of 256 values; shape (8 n, 32), float32."""
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 1, 64)
    nibbles = np.concatenate([low & np.uint8(15), low >> np.uint8(4)], axis=2)  # (n, 2, 2, 64)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    tops = (blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts) & np.uint8(3)  # (n, 2, 4, 32)
    codes = nibbles.reshape(n, 16, 16) | (tops.reshape(n, 16, 16) << np.uint8(4))
    scales = half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    signed = codes.view(np.int8) - np.int8(32)
    return (signed * scales[:, :, None]).reshape(-1, 32)


def unpack_iq4_nl(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """D times one of 16 unevenly spaced whole numbers within -128..127."""
    table = (np.array(quants.IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)
    scale = half(blocks[:, :2])
    return table[split_nibbles(cut(blocks, 2, 16))], scale, scale * np.float32(-128)


def unpack_q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """D * s * q - dmin * m, s and m for each 32 of 256 values."""
    scales, biases = _k_scales(blocks)
    nibbles = blocks[:, 16:].reshape(-1, 32)  # 64 values: low nibbles, then high nibbles
    return pair_nibbles(nibbles), scales, biases


def unpack_q5_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """As `unpack_q4_k`, with bit j of mask byte i the fifth bit of value 32 j + i."""
    scales, biases = _k_scales(blocks)
    codes = split_nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    masks = np.ascontiguousarray(blocks[:, 16:48])
    for index in range(8):
        shifted = masks << np.uint8(4 - index) if index < 4 else masks >> np.uint8(index - 4)
        codes[:, index] |= shifted & np.uint8(16)
    return pack_bits(codes.reshape(-1, 32), 5), scales, biases


def unpack_mxfp4(blocks: Bytes) -> tuple[Bytes, Floats, None]:
    """Codes and e8m0 exponents as they are; GGUF's doubled values halve its scale."""
    if (blocks[:, 0] == _NAN_E8M0).any():
        raise _no_number("MXFP4")
    return pair_nibbles(cut(blocks, 1, 16)), blocks[:, :1].copy(), None


def unpack_nvfp4(blocks: Bytes) -> tuple[Bytes, Floats, None]:
    """Codes and e4m3 scales as they are, one for each 16 of 64 values."""
    scales = blocks[:, :4]
    if (scales >= _NAN_E4M3).any():
        raise _no_number("NVFP4")
    return pair_nibbles(blocks[:, 4:].reshape(-1, 8)), scales.copy(), None


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases of 8 sub-blocks, shape (n, 8), exact in float32.

    Twelve bytes hold 6-bit pairs: bytes 0-3 and 4-7 the first four scales and minima, whose two
    top bits complete the nibbles of bytes 8-11.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    low, top = np.uint8(0x3F), np.uint8(0x30)
    scale_high = (third & np.uint8(0x0F)) | ((first >> np.uint8(2)) & top)
    least_high = (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)
    scales = np.concatenate([first & low, scale_high], axis=1)
    least = np.concatenate([second & low, least_high], axis=1)
    return half(blocks[:, :2]) * scales, -(half(blocks[:, 2:4]) * least)


def _no_number(name: str) -> ConvertError:
    return ConvertError(
        f"[repack] Scales of {name} blocks must be numbers, got NaN. "
        "The file is damaged: download it again."
    )
