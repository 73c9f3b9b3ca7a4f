"""The compiled loop against the numpy functions, to the bit; needs no MLX, so it runs where wheels
are built.
"""

import gguf
import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.repack import HAS_LOOP, IN_LOOP, LAYOUTS, Packed, ScaleOverflowError, repack

if not HAS_LOOP:
    pytest.skip("installed without the compiled loop", allow_module_level=True)
from spec_convert import _loop

Kind = gguf.GGMLQuantizationType
HALF, SINGLE = np.dtype("<f2"), np.dtype("<f4")
KINDS = sorted(IN_LOOP)
WITH_SCALES = [kind for kind in KINDS if kind is not Kind.MXFP4]
# 0, -0, subnormals, the largest that three, four and seven more powers of two leave finite, the
# least beyond, infinities and NaNs.
EXTREMES = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x6FFF, 0x7000, 0x6BFF, 0x6C00,
    0x5FFF, 0x6000, 0xEFFF, 0xF000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01,
)  # fmt: skip


def by_name(kind: Kind) -> str:
    return kind.name


def made_by(blocks: np.ndarray, kind: Kind, dtype: np.dtype, loose: bool, compiled: bool):
    """Bytes of the result, or the kind and text of the refusal."""
    try:
        packed = repack(blocks, kind, dtype, loose=loose, compiled=compiled)
    except (ConvertError, ScaleOverflowError) as error:
        return type(error), str(error)
    parts = packed.codes, packed.scales, packed.biases
    return [None if p is None else (p.dtype.str, p.shape, p.tobytes()) for p in parts]


def check(blocks: np.ndarray, kind: Kind) -> set[type]:
    """Both ways in both widths; the kinds of result that were seen."""
    seen = set()
    for dtype in (HALF, SINGLE):
        for loose in (False, True):
            wanted = made_by(blocks, kind, dtype, loose, compiled=False)
            assert made_by(blocks, kind, dtype, loose, compiled=True) == wanted
            seen.add(Packed if isinstance(wanted, list) else wanted[0])
    return seen


def blocks_of(kind: Kind, n: int, seed: int = 0) -> np.ndarray:
    """n blocks of any bytes with scales that are numbers."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    blocks[:, 1:4:2] &= 0xBF  # exponents up to 15
    if kind is Kind.MXFP4:
        blocks[:, 0] = random.integers(0, 255, n)
    return blocks


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_random_blocks_give_the_same_bits(kind, n):
    assert Packed in check(blocks_of(kind, n), kind)


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_any_bytes_give_the_same_bits_or_the_same_refusal(kind):
    random = np.random.default_rng(1)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    seen = set()
    for n in (1, 2, 5, 40):
        for _ in range(20):
            seen |= check(random.integers(0, 256, (n, size), dtype=np.uint8), kind)
    assert {Packed, ConvertError} <= seen


@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0x01])
@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_blocks_of_one_byte_give_the_same_bits_or_the_same_refusal(kind, value):
    for n in (1, 32, 33):
        check(np.full((n, gguf.GGML_QUANT_SIZES[kind][1]), value, np.uint8), kind)


@pytest.mark.parametrize("place", [0, 31, 32, 39])
@pytest.mark.parametrize("kind", WITH_SCALES, ids=by_name)
def test_one_extreme_scale_among_others_gives_the_same_bits_or_the_same_refusal(kind, place):
    seen = set()
    for column in (0, 2):
        for extreme in EXTREMES:
            blocks = blocks_of(kind, 40, seed=2)
            blocks[place, column : column + 2] = np.array([extreme], "<u2").view(np.uint8)
            seen |= check(blocks, kind)
    assert {Packed, ConvertError} <= seen


@pytest.mark.parametrize("kind", WITH_SCALES, ids=by_name)
def test_every_float16_scale_gives_the_same_bits(kind):
    """All 63,488 finite ones at once, in float32; in float16 those whose bias fits."""
    every = np.arange(1 << 16, dtype="<u2")
    finite = every[(every & 0x7C00) != 0x7C00]
    blocks = blocks_of(kind, len(finite), seed=3)
    for column in (0, 2) if LAYOUTS[kind].zero is None else (0,):
        blocks[:, column : column + 2] = finite[:, None].view(np.uint8)
    assert check(blocks, kind) >= {Packed}
    small = blocks[(finite & 0x7FFF) < 0x5C00]
    assert check(small, kind) >= {Packed}


def test_an_mxfp4_scale_of_all_ones_is_refused_alike():
    blocks = blocks_of(Kind.MXFP4, 40)
    blocks[39, 0] = 0xFF
    assert check(blocks, Kind.MXFP4) == {ConvertError}


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_rows_that_do_not_lie_side_by_side_are_read_right(kind):
    check(blocks_of(kind, 80)[::2], kind)


def buffers(kind: Kind, n: int, width: int | None = None) -> list[np.ndarray]:
    """Blocks, codes, scales and biases of the right lengths."""
    n_values, size = gguf.GGML_QUANT_SIZES[kind]
    layout = LAYOUTS[kind]
    wide = width or (1 if kind is Kind.MXFP4 else 4)
    lengths = [size, n_values * layout.bits // 8] + 2 * [n_values // layout.group * wide]
    parts = [np.zeros(n * length, np.uint8) for length in lengths]
    return parts[:3] if kind is Kind.MXFP4 else parts


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_no_blocks_are_no_work(kind):
    assert _loop.repack(kind, *buffers(kind, 0)) is True


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_buffers_that_do_not_belong_together_are_refused(kind):
    for n in (0, 1, 33):
        for index in range(len(buffers(kind, n))):
            for change in (-1, 1, 2, 4, 64):
                parts = buffers(kind, n)
                parts[index] = np.zeros(max(0, parts[index].size + change), np.uint8)
                if parts[index].size == buffers(kind, n)[index].size:
                    continue
                with pytest.raises(ValueError, match=r"^\[loop\] Buffers must fit \d+-byte blocks"):
                    _loop.repack(kind, *parts)


@pytest.mark.parametrize("kind", WITH_SCALES, ids=by_name)
def test_scales_of_two_widths_or_none_are_refused(kind):
    blocks, codes, scales, biases = buffers(kind, 3)
    for wrong in [(scales, biases[::2].copy()), (scales[::2].copy(), biases), (scales,)]:
        with pytest.raises(ValueError, match="Buffers must fit"):
            _loop.repack(kind, blocks, codes, *wrong)
    single = buffers(kind, 3, width=1)
    with pytest.raises(ValueError, match="Buffers must fit"):
        _loop.repack(kind, *single)


def test_float16_k_scales_and_mxfp4_biases_are_refused():
    with pytest.raises(ValueError, match="Buffers must fit"):
        _loop.repack(Kind.Q4_K, *buffers(Kind.Q4_K, 2, width=2))
    parts = buffers(Kind.MXFP4, 2)
    with pytest.raises(ValueError, match="Buffers must fit"):
        _loop.repack(Kind.MXFP4, *parts, np.zeros(2, np.uint8))


@pytest.mark.parametrize("kind", [-1, 0, 1, 14, 39 + 256, 2**31 - 1])
def test_types_without_a_loop_are_refused(kind):
    with pytest.raises(ValueError, match=rf"^\[loop\] No loop for GGUF type {kind}\.$"):
        _loop.repack(kind, *buffers(Kind.Q4_0, 1))


def test_buffers_that_cannot_be_filled_are_refused():
    parts = buffers(Kind.Q8_0, 4)
    for index in (1, 2, 3):
        sealed = [part.copy() for part in parts]
        sealed[index].flags.writeable = False
        with pytest.raises((TypeError, BufferError, ValueError)):
            _loop.repack(Kind.Q8_0, *sealed)
    for index in range(4):
        spread = list(parts)
        spread[index] = np.zeros(2 * parts[index].size, np.uint8)[::2]
        with pytest.raises((TypeError, BufferError, ValueError)):
            _loop.repack(Kind.Q8_0, *spread)
    for wrong in ((), (2,), (2, *parts, parts[0]), ("2", *parts), (2, "text", *parts[1:])):
        with pytest.raises(TypeError):
            _loop.repack(*wrong)


def test_not_a_byte_beyond_the_buffers_changes():
    for kind in KINDS:
        whole = [np.full(part.size + 128, 0xA5, np.uint8) for part in buffers(kind, 33)]
        inner = [part[64:-64] for part in whole]
        inner[0][:] = blocks_of(kind, 33).reshape(-1)
        assert _loop.repack(kind, *inner)
        for part in whole:
            assert (part[:64] == 0xA5).all() and (part[-64:] == 0xA5).all()
