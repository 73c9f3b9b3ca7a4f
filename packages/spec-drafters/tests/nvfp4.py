"""NVFP4 in NumPy: packs matrices as the exporter does, and says what values they then have."""

import numpy as np

Tensors = dict[str, np.ndarray]

_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3_value(bits: np.ndarray) -> np.ndarray:
    """FP8 E4M3 by its definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    bits = bits.astype(int)
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits >> 3) & 0xF, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Nearest non-negative E4M3 code."""
    table = e4m3_value(np.arange(0x7F))
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def pack(matrix: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(out, in) -> the three stored parts, and the values they stand for."""
    n_out, n_in = matrix.shape
    groups = matrix.reshape(n_out, n_in // 16, 16)
    peak = np.abs(groups).max(-1)
    overall = np.float32(peak.max() / (6 * 448))
    scale = e4m3_bits(peak / 6 / overall)
    step = e4m3_value(scale) * overall
    codes = np.abs(np.abs(groups / step[..., None])[..., None] - _CODES).argmin(-1)
    values = np.sign(groups) * _CODES[codes] * step[..., None]
    nibbles = (codes + 8 * (groups < 0)).reshape(n_out, n_in).astype(np.uint8)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": np.array(overall)}
    return stored, values.reshape(n_out, n_in)


def as_nvfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Pack the projections of the layers; returns (true values, stored tensors)."""
    true, stored = dict(tensors), dict(tensors)
    for name in tensors:
        if not name.endswith("_proj.weight") or not name.startswith("layers."):
            continue
        parts, true[name] = pack(tensors[name])
        base = name.removesuffix("weight")
        del stored[name]
        stored |= {base + key: value for key, value in parts.items()}
    return true, stored
