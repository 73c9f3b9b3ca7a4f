"""Hyper-connections: a residual stream in several copies, mixed around every sublayer.

References:
    Manifold-constrained hyper-connections as in DeepSeek-V4; Zhu et al. 2024, arXiv:2409.19606.
"""

from dataclasses import dataclass

import mlx.core as mx

from spec_drafters._deepseek_config import Hyper
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class Mixes:
    """Coefficients around one sublayer, per row.

    Attributes:
        pre: Shape (B, hc): how the copies become the sublayer's input.
        post: Shape (B, hc): how its output goes to the copies.
        comb: Shape (B, hc, hc): how copies become copies, old copy first.
    """

    pre: mx.array
    post: mx.array
    comb: mx.array


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Makes the mixes of one sublayer from the stream, all in float32.

    Attributes:
        weight: Shape ((2 + hc) hc, hc D).
        base: Shape ((2 + hc) hc,).
        scale: Same shape: the three stored scales, one for each coefficient.
        sizes: Copies, iterations, eps.
        norm_eps: Of the norm over all copies.
    """

    weight: mx.array
    base: mx.array
    scale: mx.array
    sizes: Hyper
    norm_eps: float

    def __call__(self, stream: mx.array) -> Mixes:
        """Mixes for rows (B, hc, D)."""
        hc, eps = self.sizes.n_copies, self.sizes.eps
        mixes = project(stream, self.weight, self.norm_eps) * self.scale + self.base
        pre = mx.sigmoid(mixes[:, :hc]) + eps
        post = 2 * mx.sigmoid(mixes[:, hc : 2 * hc])
        comb = mx.softmax(mixes[:, 2 * hc :].reshape(-1, hc, hc), axis=-1) + eps
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
        for _ in range(self.sizes.n_iterations - 1):
            comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
        return Mixes(pre, post, comb)


def load_hyper(
    weights: Weights, prefix: str, width: int, eps: float, sizes: Hyper
) -> HyperConnection:
    """Take the tensors of one hyper-connection: `prefix` with "_fn", "_base" and "_scale"."""
    hc = sizes.n_copies
    n = (2 + hc) * hc
    scale = weights.array(f"{prefix}_scale", (3,), dtype=mx.float32)
    return HyperConnection(
        weight=weights.array(f"{prefix}_fn", (n, hc * width), dtype=mx.float32),
        base=weights.array(f"{prefix}_base", (n,), dtype=mx.float32),
        scale=weights.keep(_by_mix(scale, hc)),
        sizes=sizes,
        norm_eps=eps,
    )


def _by_mix(scale: mx.array, hc: int) -> mx.array:
    """The scales of pre, post and comb, once for each coefficient."""
    counts = (hc, hc, hc * hc)
    return mx.concatenate([mx.broadcast_to(scale[i], (n,)) for i, n in enumerate(counts)])


@dataclass(frozen=True, slots=True)
class HyperHead:
    """The learned collapse behind the last stage (V4), in float32.

    Attributes:
        weight: Shape (hc, hc D).
        base: Shape (hc,).
        scale: Shape (1,).
        eps: Added to every coefficient.
        norm_eps: Of the norm over all copies.
    """

    weight: mx.array
    base: mx.array
    scale: mx.array
    eps: float
    norm_eps: float

    def __call__(self, stream: mx.array) -> mx.array:
        """Coefficients of the copies: (B, hc, D) -> (B, hc)."""
        mixes = project(stream, self.weight, self.norm_eps) * self.scale + self.base
        return mx.sigmoid(mixes) + self.eps


def load_hyper_head(
    weights: Weights, prefix: str, width: int, eps: float, sizes: Hyper
) -> HyperHead:
    """Take the tensors of the collapse: `prefix` with "_fn", "_base" and "_scale"."""
    hc = sizes.n_copies
    return HyperHead(
        weight=weights.array(f"{prefix}_fn", (hc, hc * width), dtype=mx.float32),
        base=weights.array(f"{prefix}_base", (hc,), dtype=mx.float32),
        scale=weights.array(f"{prefix}_scale", (1,), dtype=mx.float32),
        eps=sizes.eps,
        norm_eps=eps,
    )


def project(stream: mx.array, weight: mx.array, eps: float) -> mx.array:
    """All copies of a row as one vector, normed and projected: (B, hc, D) -> (B, n), float32."""
    flat = stream.reshape(stream.shape[0], -1).astype(mx.float32)
    return mx.fast.rms_norm(flat, None, eps) @ weight.T


def collapse(stream: mx.array, pre: mx.array) -> mx.array:
    """The copies as one row: (B, hc, D), (B, hc) -> (B, D)."""
    return (pre[..., None] * stream.astype(mx.float32)).sum(axis=1).astype(stream.dtype)


def expand(y: mx.array, stream: mx.array, mixes: Mixes) -> mx.array:
    """A sublayer's output added to the mixed copies: (B, D), (B, hc, D) -> (B, hc, D)."""
    mixed = mixes.comb.swapaxes(-1, -2) @ stream.astype(mx.float32)
    added = mixes.post[..., None] * y[:, None].astype(mx.float32)
    return (mixed + added).astype(stream.dtype)
