"""Latent attention of a block over the newest context rows and over itself, with one shared head.

Keys and values are one vector per row that all query heads share. Heads of a group leave through a
low-rank projection of their own.

References:
    DeepSeek-V4 technical report: multi-head latent attention with a sliding window.
"""

from dataclasses import dataclass

import mlx.core as mx

from spec_drafters._context import ContextCache
from spec_drafters._deepseek_config import Attention
from spec_drafters._linear import Matrix, MatrixStack
from spec_drafters._rope import Rope, Rotation
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of one attention.

    Attributes:
        q_down: D -> q_rank.
        q_norm: Shape (q_rank,).
        q_up: q_rank -> n_heads head_dim.
        kv: D -> head_dim.
        kv_norm: Shape (head_dim,).
        o_down: Per group, n_heads head_dim / n_groups -> o_rank.
        o_up: n_groups o_rank -> D.
        sinks: A logit per head in the softmax denominator, shape (n_heads,), float32.
        sizes: Heads, ranks, rope.
        eps: Of the norms.
        rotation: Of the trailing dimensions.
    """

    q_down: Matrix
    q_norm: mx.array
    q_up: Matrix
    kv: Matrix
    kv_norm: mx.array
    o_down: MatrixStack
    o_up: Matrix
    sinks: mx.array
    sizes: Attention
    eps: float
    rotation: Rotation

    def rows(self, x: mx.array, position: int) -> mx.array:
        """Keys (which are the values) of rows (M, D): (1, 1, M, head_dim)."""
        kv = mx.fast.rms_norm(self.kv(x), self.kv_norm, self.eps)
        return self._turned(kv[None, None], position)

    def __call__(self, x: mx.array, cache: ContextCache) -> mx.array:
        """Every row of a block sees the whole block and the cached rows: (B, D) -> (B, D)."""
        sizes, position, n_rows = self.sizes, cache.n_rows, x.shape[0]
        q = self.q_up(mx.fast.rms_norm(self.q_down(x), self.q_norm, self.eps))
        q = q.reshape(n_rows, sizes.n_heads, sizes.head_dim)
        if sizes.head_norm:
            q = mx.fast.rms_norm(q, None, self.eps)
        q = self._turned(q.transpose(1, 0, 2)[None], position)  # (1, heads, B, hd)
        own = self.rows(x, position)
        kv, _ = cache.with_block(own, own)
        # At this width of a head MLX rounds the scores to the type of the input.
        kv = kv.astype(mx.float32)
        out = mx.fast.scaled_dot_product_attention(
            q.astype(mx.float32), kv, kv, scale=sizes.head_dim**-0.5, sinks=self.sinks
        )
        out = self._turned(out.astype(x.dtype), position, back=True)[0].transpose(1, 0, 2)
        groups = mx.broadcast_to(mx.arange(sizes.n_groups), (n_rows, sizes.n_groups))
        latent = self.o_down(out.reshape(n_rows, sizes.n_groups, -1), groups)
        return self.o_up(latent.reshape(n_rows, -1))

    def _turned(self, x: mx.array, position: int, *, back: bool = False) -> mx.array:
        """The trailing dimensions rotated, neighbours in pairs."""
        dims = self.sizes.rope_dims
        turned = self.rotation(x[..., -dims:], position, back=back)
        return mx.concatenate([x[..., :-dims], turned], axis=-1)


def load_attention(
    weights: Weights, prefix: str, width: int, eps: float, sizes: Attention
) -> LatentAttention:
    """Take the tensors of one attention, whose names start with `prefix`."""
    n_all = sizes.n_heads * sizes.head_dim
    n_latent = sizes.n_groups * sizes.o_rank
    rope = Rope(sizes.theta, sizes.rope_dims, interleaved=True)
    joint = weights.matrix(f"{prefix}.wo_a", n_latent, n_all // sizes.n_groups)
    return LatentAttention(
        q_down=weights.matrix(f"{prefix}.wq_a", sizes.q_rank, width),
        q_norm=weights.array(f"{prefix}.q_norm.weight", (sizes.q_rank,)),
        q_up=weights.matrix(f"{prefix}.wq_b", n_all, sizes.q_rank),
        kv=weights.matrix(f"{prefix}.wkv", sizes.head_dim, width),
        kv_norm=weights.array(f"{prefix}.kv_norm.weight", (sizes.head_dim,)),
        o_down=weights.keep(joint.split(sizes.n_groups)),
        o_up=weights.matrix(f"{prefix}.wo_b", width, n_latent),
        sinks=weights.array(f"{prefix}.attn_sink", (sizes.n_heads,), dtype=mx.float32),
        sizes=sizes,
        eps=eps,
        rotation=Rotation(rope, sizes.rope_dims),
    )
