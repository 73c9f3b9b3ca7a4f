"""When prefill dequantises first, and that the product stays the same."""

import mlx.core as mx
import pytest

from spec_kernels import wide_prefill, wide_prefill_ops
from spec_kernels.matmul import stock_matmul
from spec_kernels.numerics import MatmulShape, random_weight


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantising_first_equals_the_quantised_product_in_float32(bits):
    weight = random_weight(MatmulShape(48, 128, bits, 64, "float32"))
    x = mx.random.normal((1, 300, 128), key=mx.random.key(0))
    assert mx.allclose(wide_prefill_ops(x, weight), stock_matmul(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "from_rows", "bits", "choice"),
    [
        (512, 512, 4, ("wide", "512 rows, it wins from 512")),
        (511, 512, 4, ("stock", "511 rows, it wins from 512")),
        (200, 100, 4, ("stock", "200 rows, it wins from 100")),
        (512, None, 4, ("stock", "no crossover was measured")),
        (512, 256, 16, ("stock", "the weight is not quantised")),
    ],
)
def test_the_dispatcher_says_what_it_took_and_why(rows, from_rows, bits, choice):
    weight = random_weight(MatmulShape(8, 64, bits, 64, "float32"))
    x = mx.ones((rows, 64))
    y, taken = wide_prefill(x, weight, from_rows=from_rows)
    assert taken == choice
    assert y.shape == (rows, 8)
