"""Matrices as the heads use them: plain or quantised, applied to rows or looked up by id.

Knows nothing about heads, files or names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Quantised:
    """The second half of a quantised matrix (MLX affine).

    Attributes:
        scales: Shape (out, in / group_size).
        biases: Same shape.
        group_size: Columns that share a scale.
        bits: Bits per weight.
    """

    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear map, or an embedding table.

    Attributes:
        weight: Shape (out, in), or packed to (out, in * bits / 32) uint32.
        bias: Shape (out,), or None.
        quantised: None for a plain matrix.
    """

    weight: mx.array
    bias: mx.array | None = None
    quantised: Quantised | None = None

    @property
    def n_out(self) -> int:
        """Number of rows."""
        return self.weight.shape[0]

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to rows: (..., in) -> (..., out)."""
        q = self.quantised
        if q is None:
            y = x @ self.weight.T
        else:
            y = mx.quantized_matmul(
                x,
                self.weight,
                q.scales,
                q.biases,
                transpose=True,
                group_size=q.group_size,
                bits=q.bits,
            )
        return y if self.bias is None else y + self.bias

    def lookup(self, ids: mx.array) -> mx.array:
        """Rows by id: (...) int32 -> (..., in)."""
        q = self.quantised
        if q is None:
            return self.weight[ids]
        return mx.dequantize(
            self.weight[ids],
            q.scales[ids],
            q.biases[ids],
            group_size=q.group_size,
            bits=q.bits,
        )

    def slice(self, start: int, stop: int) -> "Matrix":
        """The rows start..stop-1; shares the memory."""
        q = self.quantised
        return Matrix(
            self.weight[start:stop],
            None if self.bias is None else self.bias[start:stop],
            q and Quantised(q.scales[start:stop], q.biases[start:stop], q.group_size, q.bits),
        )

    @property
    def arrays(self) -> list[mx.array]:
        """Everything it holds, for evaluation."""
        q = self.quantised
        held = [self.weight] if self.bias is None else [self.weight, self.bias]
        return held if q is None else [*held, q.scales, q.biases]


def quantise(matrix: Matrix, bits: int, group_size: int) -> Matrix:
    """The same map in fewer bits; `in` must be a multiple of group_size."""
    weight, scales, biases = mx.quantize(matrix.weight, group_size=group_size, bits=bits)
    return Matrix(weight, matrix.bias, Quantised(scales, biases, group_size, bits))


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix with the rows of all, in order; all plain or all quantised alike."""
    biases = [m.bias for m in matrices if m.bias is not None]
    bias = mx.concatenate(biases) if biases else None
    weight = mx.concatenate([m.weight for m in matrices])
    quants = [m.quantised for m in matrices if m.quantised is not None]
    if not quants:
        return Matrix(weight, bias)
    first = quants[0]
    scales = mx.concatenate([q.scales for q in quants])
    zeros = mx.concatenate([q.biases for q in quants])
    return Matrix(weight, bias, Quantised(scales, zeros, first.group_size, first.bits))


def stackable(matrices: Sequence[Matrix]) -> bool:
    """True when `stack` can join them: same packing, biases on all or none."""
    kinds = {
        (m.bias is None, m.quantised and (m.quantised.bits, m.quantised.group_size))
        for m in matrices
    }
    return len(kinds) == 1
