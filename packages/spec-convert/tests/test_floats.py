import gguf
import mlx.core as mx
import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.floats import BF16, F16, F32, decode, encode, to_float32

Kind = gguf.GGMLQuantizationType


def test_bfloat16_rounds_like_mlx():
    random = np.random.default_rng(0)
    values = random.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, np.inf, -np.inf, 3.3895314e38, 1e-45])])
    finite = values[~np.isnan(values)]
    wanted = np.array(mx.array(finite).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(encode(finite, BF16), wanted)
    assert np.isnan(decode(encode(np.float32([np.nan]), BF16), BF16)).all()


def test_what_a_type_can_hold_comes_back_unchanged():
    values = np.float32([0, 1, -2.5, 1 / 3])
    assert np.array_equal(decode(encode(values, F32), F32), values)
    for target in (F16, BF16):
        once = decode(encode(values, target), target)
        assert np.array_equal(decode(encode(once, target), target), once)


def test_values_beyond_float16_are_refused():
    with pytest.raises(ConvertError, match=r"within 65504 for f16, got 70000\. Use --dtype bf16"):
        encode(np.float32([1, 70000]), F16)
    assert np.isinf(encode(np.float32([np.inf]), F16)).all()


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q6_K, Kind.IQ4_NL, Kind.TQ2_0]
)
def test_rows_are_read_as_the_gguf_package_reads_them(kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    rows = random.integers(0, 100, (4, 512 // block * size), dtype=np.uint8)
    assert np.array_equal(
        to_float32(rows, kind), gguf.quants.dequantize(rows, kind), equal_nan=True
    )


def test_integers_and_doubles_are_read():
    assert to_float32(np.array([[255, 1]], np.uint8), Kind.I8).tolist() == [[-1, 1]]
    assert to_float32(np.array([[0.1]]).view(np.uint8), Kind.F64).tolist() == [[np.float32(0.1)]]


def test_a_type_without_a_dequantiser_is_refused_by_name():
    with pytest.raises(ConvertError, match="Q8_1 has no dequantiser"):
        to_float32(np.zeros((1, 40), np.uint8), Kind.Q8_1)
