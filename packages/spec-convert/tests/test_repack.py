import gguf
import mlx.core as mx
import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.repack import LAYOUTS, Packed, ScaleOverflowError

Kind = gguf.GGMLQuantizationType
HALF, SINGLE = np.dtype("<f2"), np.dtype("<f4")
EXACT = [kind for kind, layout in LAYOUTS.items() if layout.exact]
ROUNDED = [kind for kind, layout in LAYOUTS.items() if not layout.exact]
# Byte positions of the float16 numbers in a block.
HALVES = {
    Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,),
    Kind.MXFP4: (), Kind.NVFP4: (), Kind.IQ1_M: (),
}  # fmt: skip


def random_rows(kind: Kind, n_rows: int = 16, n_values: int = 512, seed: int = 0) -> np.ndarray:
    """Rows of arbitrary bytes, with scales of either sign from subnormal to large."""
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (n_rows, n_values // block, size), dtype=np.uint8)
    for position in HALVES.get(kind, (0,)):
        scale = random.normal(size=(*blocks.shape[:2], 1))
        scale *= 10.0 ** random.uniform(-7, 0, scale.shape)
        blocks[..., position : position + 2] = scale.astype("<f2").view(np.uint8)
    if kind is Kind.MXFP4:
        blocks[..., 0] = random.integers(0, 240, blocks.shape[:2])
    if kind is Kind.NVFP4:
        blocks[..., :4] = random.integers(0, 127, (*blocks.shape[:2], 4))
    if kind is Kind.IQ1_M:  # four top nibbles make one float16
        blocks[..., 49::2] &= 0x0F
        blocks[..., 55] |= 0x20
    return blocks.reshape(n_rows, -1)


def scale_dtype(kind: Kind) -> np.dtype:
    return SINGLE if LAYOUTS[kind].wide else HALF


def mlx_values(packed: Packed, kind: Kind) -> np.ndarray:
    """What MLX makes of it, computed in float32."""
    layout = LAYOUTS[kind]
    settings = {"group_size": layout.group, "bits": layout.bits, "mode": layout.mode}
    words = mx.array(np.ascontiguousarray(packed.codes).view("<u4"))
    if packed.biases is None:
        values = mx.dequantize(words, mx.array(packed.scales), **settings, dtype=mx.float32)
    else:
        scales, biases = (mx.array(p.astype("<f4")) for p in (packed.scales, packed.biases))
        values = mx.dequantize(words, scales, biases, **settings)
    return np.array(values)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_mlx_reads_the_same_numbers_as_the_gguf_package(kind, repack):
    rows = random_rows(kind)
    packed = repack(rows, kind, scale_dtype(kind))
    assert packed.scales.shape == (16, 512 // LAYOUTS[kind].group)
    assert np.array_equal(mlx_values(packed, kind), gguf.quants.dequantize(rows, kind))


def quantisable(kind: Kind) -> bool:
    try:
        gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("kind", [k for k in LAYOUTS if quantisable(k)], ids=lambda kind: kind.name)
def test_blocks_of_the_gguf_quantiser_are_carried_over_exactly(kind, repack):
    values = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    rows = gguf.quants.quantize(values, kind)
    packed = repack(rows, kind, scale_dtype(kind))
    assert np.array_equal(mlx_values(packed, kind), gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_other_types_are_off_by_at_most_half_a_step_of_255(kind, repack):
    rows = random_rows(kind)
    packed = repack(rows, kind, HALF)
    wanted = gguf.quants.dequantize(rows, kind).astype(np.float64)
    groups = wanted.reshape(16, -1, 32)
    span = groups.max(axis=2) - groups.min(axis=2)
    # Both are float16: the span grows by one unit of the bias, the step by one of its own.
    least = np.abs(groups.min(axis=2))
    step = (span + least * 2.0**-10 + 2.0**-24) / 255 * (1 + 2.0**-10) + 2.0**-24
    assert (packed.scales <= step).all()
    error = np.abs(mlx_values(packed, kind) - wanted).reshape(16, -1, 32)
    rounding = np.abs(groups) * 2.0**-22
    assert (error <= step[..., None] * (0.5 + 2.0**-12) + rounding).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name
)
def test_codes_are_the_stored_codes(kind, repack):
    """Value k of a row is bits [k * bits, (k + 1) * bits) of one little-endian stream."""
    rows = random_rows(kind, 3, 128)
    bits = LAYOUTS[kind].bits
    packed = repack(rows, kind, HALF)
    unit = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    for position in HALVES.get(kind, (0,)):
        unit[:, position : position + 2] = 0
    unit[:, :2] = np.array([1], "<f2").view(np.uint8)
    # With scale 1 and minimum 0 the values are the codes, less the type's zero point.
    codes = gguf.quants.dequantize(unit, kind).reshape(3, -1).astype(int)
    codes += {Kind.Q4_0: 8, Kind.Q5_0: 16, Kind.Q8_0: 128}.get(kind, 0)
    for row, expected in zip(packed.codes, codes, strict=True):
        stream = int.from_bytes(row.tobytes(), "little")
        got = [(stream >> (index * bits)) & ((1 << bits) - 1) for index in range(len(expected))]
        assert got == expected.tolist()


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.IQ4_XS], ids=lambda kind: kind.name)
def test_small_scales_round_only_scale_and_bias(kind, repack):
    rows = random_rows(kind)
    exact = repack(rows, kind, SINGLE)
    with pytest.raises(ScaleOverflowError):
        repack(rows, kind, HALF)
    loose = repack(rows, kind, HALF, loose=True)
    assert exact.biases is not None and loose.biases is not None
    assert np.array_equal(loose.codes, exact.codes)
    assert np.array_equal(loose.scales, exact.scales.astype("<f2"))
    assert np.array_equal(loose.biases, exact.biases.astype("<f2"))


def test_a_q3_k_group_that_reaches_128_counts_downwards(repack):
    blocks = np.zeros((1, 110), np.uint8)
    blocks[0, 108:] = np.array([1], "<f2").view(np.uint8)  # scales 0 - 32, codes 0 - 4: all 128
    packed = repack(blocks, Kind.Q3_K, HALF)
    assert (mlx_values(packed, Kind.Q3_K) == 128).all()
    assert (packed.scales == -1).all()


def test_a_bias_beyond_float16_asks_for_float32_scales(repack):
    rows = random_rows(Kind.Q4_0, 1, 32)
    rows[:, :2] = np.array([-60000], "<f2").view(np.uint8)
    with pytest.raises(ScaleOverflowError):
        repack(rows, Kind.Q4_0, HALF)
    got = mlx_values(repack(rows, Kind.Q4_0, SINGLE), Kind.Q4_0)
    assert np.array_equal(got, gguf.quants.dequantize(rows, Kind.Q4_0))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_scales_that_are_no_numbers_are_refused(kind, repack):
    rows = random_rows(kind, 1, 256)
    for position in HALVES.get(kind, (0,)):
        rows[:, position : position + 2] = np.array([np.nan], "<f2").view(np.uint8)
    if kind in (Kind.MXFP4, Kind.NVFP4):
        rows[:, 0] = 0xFF
    if kind is Kind.IQ1_M:
        rows[:, 49::2] |= 0xF0
    with pytest.raises(ConvertError, match="Scales .*must be .*numbers, got"):
        repack(rows, kind, SINGLE)
