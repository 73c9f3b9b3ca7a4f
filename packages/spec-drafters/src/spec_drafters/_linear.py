"""Matrices as the heads use them: plain or quantised, applied to rows or looked up by id.

Knows nothing about heads, files or names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Quantised:
    """The second half of a quantised matrix.

    Attributes:
        scales: Shape (.., out, in / group_size).
        biases: Same shape; None in the modes without.
        group_size: Columns that share a scale.
        bits: Bits per weight.
        mode: MLX's name of the packing: "affine", "mxfp8" (E4M3), "mxfp4" (E2M1).
    """

    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @property
    def kind(self) -> dict[str, Any]:
        """The packing, as MLX's functions take it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def arrays(self) -> list[mx.array]:
        """Everything it holds."""
        return [self.scales] if self.biases is None else [self.scales, self.biases]

    def map(self, change: Callable[[mx.array], mx.array]) -> "Quantised":
        """The same packing with both arrays changed alike."""
        biases = None if self.biases is None else change(self.biases)
        return replace(self, scales=change(self.scales), biases=biases)


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
            y = mx.quantized_matmul(x, self.weight, q.scales, q.biases, transpose=True, **q.kind)
        return y if self.bias is None else y + self.bias

    def lookup(self, ids: mx.array) -> mx.array:
        """Rows by id: (...) int32 -> (..., in)."""
        q = self.quantised
        if q is None:
            return self.weight[ids]
        at = q.map(lambda array: array[ids])
        return mx.dequantize(self.weight[ids], at.scales, at.biases, **q.kind)

    def slice(self, start: int, stop: int) -> "Matrix":
        """The rows start..stop-1; shares the memory."""
        q = self.quantised
        return Matrix(
            self.weight[start:stop],
            None if self.bias is None else self.bias[start:stop],
            q and q.map(lambda array: array[start:stop]),
        )

    def split(self, n: int) -> "MatrixStack":
        """Its rows in n equal runs, each a matrix of its own; without the bias."""

        def cut(array: mx.array) -> mx.array:
            return array.reshape(n, array.shape[0] // n, array.shape[1])

        return MatrixStack(cut(self.weight), self.quantised and self.quantised.map(cut))

    @property
    def arrays(self) -> list[mx.array]:
        """Everything it holds, for evaluation."""
        q = self.quantised
        held = [self.weight] if self.bias is None else [self.weight, self.bias]
        return held if q is None else [*held, *q.arrays]


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """Matrices of one shape, picked by index for every row: experts, or groups of heads.

    Attributes:
        weight: Shape (E, out, in), or packed.
        quantised: None for plain matrices.
    """

    weight: mx.array
    quantised: Quantised | None = None

    def __call__(self, x: mx.array, picked: mx.array) -> mx.array:
        """Rows (B, k, in), or (B, 1, in) for all k alike, through matrices (B, k): (B, k, out)."""
        rows, q = x[:, :, None], self.quantised
        if q is None:
            y = mx.gather_mm(rows, self.weight.swapaxes(-1, -2), rhs_indices=picked)
        else:
            y = mx.gather_qmm(
                rows, self.weight, q.scales, q.biases, rhs_indices=picked, transpose=True, **q.kind
            )
        return y[:, :, 0]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything it holds, for evaluation."""
        return [self.weight] if self.quantised is None else [self.weight, *self.quantised.arrays]


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
    zeros = [q.biases for q in quants if q.biases is not None]
    joint = replace(first, scales=scales, biases=mx.concatenate(zeros) if zeros else None)
    return Matrix(weight, bias, joint)


def unpacked(weight: mx.array, quantised: Quantised, dtype: mx.Dtype) -> mx.array:
    """A packed weight as plain numbers, (.., out, in)."""
    plain = mx.dequantize(weight, quantised.scales, quantised.biases, **quantised.kind)
    return plain.astype(dtype)


def stackable(matrices: Sequence[Matrix]) -> bool:
    """True when `stack` can join them: same packing, biases on all or none."""
    kinds = {(m.bias is None, m.quantised and tuple(m.quantised.kind.values())) for m in matrices}
    return len(kinds) == 1
