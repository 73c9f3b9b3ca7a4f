"""Quantised matmul of many rows: dequantise the weight once, then one dense matmul.

Stock MLX dequantises inside the tiles of its matmul, once for every 32 to 128 rows. From some
hundred rows on it is cheaper to pay the transient (N * K * 2 bytes) once a chunk of the prompt.
Where the crossover lies is measured, never assumed; below `MIN_ROWS` it is not even tried.
"""

import mlx.core as mx

from spec_kernels.matmul import Weight, stock_matmul

MIN_ROWS = 256


def wide_prefill_ops(x: mx.array, weight: Weight) -> mx.array:
    """`x @ dequantise(W).T` in the dtype of the scales.

    Args:
        x: (..., K).
        weight: a quantised (N, K) weight.

    Returns:
        (..., N).
    """
    if weight.scales is None:
        return x @ weight.w.T
    full = mx.dequantize(
        weight.w,
        weight.scales,
        weight.biases,
        group_size=weight.group_size,
        bits=weight.bits,
    )
    return x @ full.T


def wide_prefill(
    x: mx.array, weight: Weight, *, from_rows: int | None
) -> tuple[mx.array, tuple[str, str]]:
    """Multiply, dequantising first if there are enough rows.

    Args:
        x: (..., K).
        weight: the (N, K) weight.
        from_rows: measured crossover; None if it never wins here.

    Returns:
        (..., N), and ("wide" | "stock", reason).
    """
    rows = x.size // x.shape[-1]
    if weight.scales is None:
        return stock_matmul(x, weight), ("stock", "the weight is not quantised")
    if from_rows is None:
        return stock_matmul(x, weight), ("stock", "no crossover was measured")
    if rows < max(from_rows, MIN_ROWS):
        return stock_matmul(x, weight), ("stock", f"{rows} rows, it wins from {from_rows}")
    return wide_prefill_ops(x, weight), ("wide", f"{rows} rows, it wins from {from_rows}")
