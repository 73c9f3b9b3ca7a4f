"""A mixture of experts: a few routed ones for every row, and one that all rows share.

Experts are chosen by score, or looked up by the row's token where the stage holds such a table.

References:
    DeepSeek-V4 technical report: scores sqrt(softplus), bias for the choice alone, hash routing.
"""

from dataclasses import dataclass

import mlx.core as mx

from spec_core import LoadError
from spec_core.host import host_ints
from spec_drafters._deepseek_config import WHERE, Experts
from spec_drafters._linear import Matrix, MatrixStack
from spec_drafters._weights import Weights

_LEAST = 1e-20  # keeps the sum of routing weights from being zero


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of one mixture.

    Attributes:
        gate: Shape (E, D), float32.
        bias: Added to the scores for the choice, shape (E,), float32; None with a table.
        table: Experts of each token, shape (V, k), int32; None where scores choose.
        routed: Gate, down and up projections of the routed experts (w1, w2, w3).
        shared: The same of the shared expert.
        sizes: Counts, limits.
    """

    gate: mx.array
    bias: mx.array | None
    table: mx.array | None
    routed: tuple[MatrixStack, MatrixStack, MatrixStack]
    shared: tuple[Matrix, Matrix, Matrix]
    sizes: Experts

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """Rows (B, D) of the tokens (B,) through their experts: (B, D)."""
        picked, share = self._route(x, ids)
        gate, down, up = self.routed
        rows = x[:, None]  # (B, 1, D)
        inner = self._activated(gate(rows, picked), up(rows, picked), x.dtype)  # (B, k, I)
        routed = (down(inner, picked).astype(mx.float32) * share[..., None]).sum(axis=1)
        gate, down, up = self.shared
        common = down(self._activated(gate(x), up(x), x.dtype))
        return (routed + common.astype(mx.float32)).astype(x.dtype)

    def _route(self, x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Experts and their shares for every row, (B, k) each."""
        logits = x.astype(mx.float32) @ self.gate.T / self.sizes.temperature
        scores = mx.sqrt(mx.logaddexp(logits, 0.0))  # softplus
        if self.table is not None:
            picked = self.table[ids]
        else:
            assert self.bias is not None
            k = self.sizes.n_active
            picked = mx.argpartition(-(scores + self.bias), k - 1, axis=-1)[:, :k]
        share = mx.take_along_axis(scores, picked, axis=-1)
        if self.sizes.normed:
            share = share / (share.sum(axis=-1, keepdims=True) + _LEAST)
        return picked, share * self.sizes.scale

    def _activated(self, gate: mx.array, up: mx.array, dtype: mx.Dtype) -> mx.array:
        gate, up = gate.astype(mx.float32), up.astype(mx.float32)
        limit = self.sizes.limit
        if limit > 0:
            gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
        return (gate * mx.sigmoid(gate) * up).astype(dtype)


def load_mixture(
    weights: Weights, prefix: str, width: int, vocab_size: int, sizes: Experts
) -> Mixture:
    """Take the tensors of one mixture, whose names start with `prefix`."""
    inner, n = sizes.inner, sizes.n_experts
    shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    table = bias = None
    if weights.has(f"{prefix}.gate.tid2eid"):
        shape = (vocab_size, sizes.n_active)
        table = weights.array(f"{prefix}.gate.tid2eid", shape, dtype=mx.int32)
        _refuse_other_experts(f"{prefix}.gate.tid2eid", table, n)
    else:
        bias = weights.array(f"{prefix}.gate.bias", (n,), dtype=mx.float32)
    weights.ignore(f"{prefix}.gate.bias_vl")  # routes the tokens of pictures

    def routed(part: str) -> MatrixStack:
        names = [f"{prefix}.experts.{e}.{part}" for e in range(n)]
        return weights.stack(names, *shapes[part])

    def shared(part: str) -> Matrix:
        return weights.matrix(f"{prefix}.shared_experts.{part}", *shapes[part])

    return Mixture(
        gate=weights.array(f"{prefix}.gate.weight", (n, width), dtype=mx.float32),
        bias=bias,
        table=table,
        routed=(routed("w1"), routed("w2"), routed("w3")),
        shared=(shared("w1"), shared("w2"), shared("w3")),
        sizes=sizes,
    )


def _refuse_other_experts(name: str, table: mx.array, n_experts: int) -> None:
    least, most = host_ints(mx.stack([table.min(), table.max()]))  # sync: once, at load
    if least < 0 or most >= n_experts:
        raise LoadError(
            f'[{WHERE}] "{name}" must name experts 0..{n_experts - 1}, got {least}..{most}. '
            "Download the checkpoint again."
        )
