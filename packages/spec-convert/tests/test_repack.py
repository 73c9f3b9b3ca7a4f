import gguf
import mlx.core as mx
import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.repack import BLOCK_BYTES, LAYOUTS, ScaleOverflowError, repack

Kind = gguf.GGMLQuantizationType
HALF = np.dtype("<f2")
SINGLE = np.dtype("<f4")
N_HALVES = {Kind.Q4_0: 1, Kind.Q4_1: 2, Kind.Q5_0: 1, Kind.Q5_1: 2, Kind.Q8_0: 1}


def random_rows(kind: Kind, n_rows: int, n_blocks: int, seed: int = 0) -> np.ndarray:
    """Rows of every code pattern, with scales of either sign from subnormal to large."""
    random = np.random.default_rng(seed)
    shape = (n_rows, n_blocks, BLOCK_BYTES[kind])
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    halves = random.normal(size=(n_rows, n_blocks, N_HALVES[kind]))
    halves *= 10.0 ** random.uniform(-7, 2, halves.shape)
    blocks[..., : 2 * N_HALVES[kind]] = halves.astype("<f2").view(np.uint8)
    return blocks.reshape(n_rows, -1)


def mlx_values(affine, bits: int) -> np.ndarray:
    """What MLX makes of it, computed in float32."""
    words = mx.array(affine.codes.view("<u4"))
    scales, biases = (mx.array(part.astype("<f4")) for part in (affine.scales, affine.biases))
    return np.array(mx.dequantize(words, scales, biases, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_mlx_reads_the_same_numbers_as_the_gguf_package(kind, dtype):
    rows = random_rows(kind, 24, 5)
    affine = repack(rows, kind, dtype)
    assert affine.scales.dtype == dtype and affine.scales.shape == (24, 5)
    got = mlx_values(affine, LAYOUTS[kind].bits)
    assert np.array_equal(got, gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_blocks_of_the_gguf_quantiser_are_carried_over_exactly(kind):
    values = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    rows = gguf.quants.quantize(values, kind)
    got = mlx_values(repack(rows, kind, HALF), LAYOUTS[kind].bits)
    assert np.array_equal(got, gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_codes_are_the_stored_codes(kind):
    """Value k of a row is bits [k * bits, (k + 1) * bits) of one little-endian stream."""
    rows = random_rows(kind, 3, 4, seed=2)
    bits = LAYOUTS[kind].bits
    affine = repack(rows, kind, SINGLE)
    unit = rows.reshape(-1, BLOCK_BYTES[kind]).copy()
    unit[:, : 2 * N_HALVES[kind]] = 0
    unit[:, :2] = np.array([1], "<f2").view(np.uint8)
    # With scale 1 and minimum 0 the values are the codes, less the type's zero point.
    codes = gguf.quants.dequantize(unit, kind).reshape(3, -1).astype(int)
    codes += {Kind.Q4_0: 8, Kind.Q5_0: 16, Kind.Q8_0: 128}.get(kind, 0)
    for row, expected in zip(affine.codes, codes, strict=True):
        stream = int.from_bytes(row.tobytes(), "little")
        got = [(stream >> (index * bits)) & ((1 << bits) - 1) for index in range(len(expected))]
        assert got == expected.tolist()


def test_a_bias_beyond_float16_asks_for_float32_scales():
    rows = random_rows(Kind.Q4_0, 1, 1)
    rows[:, :2] = np.array([-60000], "<f2").view(np.uint8)
    with pytest.raises(ScaleOverflowError):
        repack(rows, Kind.Q4_0, HALF)
    got = mlx_values(repack(rows, Kind.Q4_0, SINGLE), 4)
    assert np.array_equal(got, gguf.quants.dequantize(rows, Kind.Q4_0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_refused(value):
    rows = random_rows(Kind.Q8_0, 1, 2)
    rows[:, :2] = np.array([value], "<f2").view(np.uint8)
    with pytest.raises(ConvertError, match="Scales must be finite"):
        repack(rows, Kind.Q8_0, SINGLE)
