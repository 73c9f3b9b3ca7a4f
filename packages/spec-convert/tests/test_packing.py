import numpy as np
import pytest

from spec_convert.packing import cut, five_bits, pack_bits, pair_nibbles, put, split_nibbles


def stream_values(row: np.ndarray, bits: int) -> list[int]:
    """Codes of a little-endian bit stream, by the definition."""
    stream = int.from_bytes(row.tobytes(), "little")
    count = len(row) * 8 // bits
    return [(stream >> (index * bits)) & ((1 << bits) - 1) for index in range(count)]


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_become_one_stream(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (20, 32), dtype=np.uint8)
    for row, wanted in zip(pack_bits(codes, bits), codes, strict=True):
        assert stream_values(row, bits) == wanted.tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_columns_are_cut_and_put_back(size):
    rows = np.random.default_rng(size).integers(0, 256, (9, 37), dtype=np.uint8)
    columns = cut(rows, 3, size)
    assert columns.flags.c_contiguous
    assert np.array_equal(columns, rows[:, 3 : 3 + size])
    target = np.zeros_like(rows)
    put(target, 5, columns)
    assert np.array_equal(target[:, 5 : 5 + size], columns)
    assert target.sum() == columns.sum(dtype=int)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_halves_become_neighbours(width):
    blocks = np.random.default_rng(1).integers(0, 256, (20, width + 3), dtype=np.uint8)
    quants = blocks[:, 3 : 3 + width].copy()
    for row, wanted in zip(pair_nibbles(quants), split_nibbles(quants), strict=True):
        assert stream_values(row, 4) == wanted.tolist()


def test_fifth_bits_join_their_codes():
    random = np.random.default_rng(2)
    low = random.integers(0, 16, (20, 32), dtype=np.uint8)
    high = random.integers(0, 2, (20, 32), dtype=np.uint8)
    mask = np.packbits(high, axis=1, bitorder="little")
    quants = low[:, :16] | (low[:, 16:] << 4)
    packed = five_bits(quants[:, :8].copy(), quants[:, 8:].copy(), mask)
    for row, wanted in zip(packed, low + 16 * high, strict=True):
        assert stream_values(row, 5) == wanted.tolist()
