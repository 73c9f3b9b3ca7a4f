"""The accept rule: which drafts are kept, and which token follows them. Pure functions on arrays.

Written to be read beside the papers. p is the target's distribution, q the draft's.

References:
    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023, arXiv:2302.01318,
    Algorithm 2.
"""

import mlx.core as mx

from spec_core.sampling import draw
from spec_core.types import Acceptance


def accept_greedy(logits: mx.array, drafts: mx.array, dtype: mx.Dtype | None = None) -> Acceptance:
    """Temperature 0: a draft is kept while it is the arg-max of the row before it.

    Args:
        logits: Target logits over `[anchor, d1..dK]`, shape (K + 1, V); penalties applied.
        drafts: d1..dK, shape (K,), int32; K may be 0.
        dtype: What the target computed its logits in, for near ties; that of `logits` without.
    """
    best = mx.argmax(logits, axis=-1).astype(mx.int32)  # (K + 1,), ties: the lowest id
    n_accepted = _longest_prefix(best[:-1] == drafts)
    ties = mx.cumsum(near_tie(logits, best, dtype).astype(mx.int32))
    return Acceptance(n_accepted, mx.take(best, n_accepted), mx.take(ties, n_accepted))


def accept_greedy_rows(logits: mx.array, drafts: mx.array, n_drafted: mx.array) -> Acceptance:
    """`accept_greedy` for several sequences at once.

    Args:
        logits: Target logits, shape (B, K + 1, V), in the type that the target computed them in.
        drafts: Shape (B, K), int32, padded behind each row's own.
        n_drafted: Shape (B,), int32: drafts of each row.

    Returns:
        Arrays of shape (B,).
    """
    n_rows, width, vocab_size = logits.shape
    best = mx.argmax(logits, axis=-1).astype(mx.int32)  # (B, K + 1), ties: the lowest id
    tied = near_tie(logits.reshape(-1, vocab_size), best.reshape(-1)).reshape(n_rows, width)
    if width == 1:
        none = mx.zeros((n_rows,), mx.int32)
        return Acceptance(none, best[:, 0], tied[:, 0].astype(mx.int32))
    kept = (best[:, :-1] == drafts) & (mx.arange(width - 1) < n_drafted[:, None])
    n_accepted = mx.cumprod(kept.astype(mx.int32), axis=-1).sum(axis=-1).astype(mx.int32)
    ties = mx.cumsum(tied.astype(mx.int32), axis=-1)
    at = n_accepted[:, None]
    token, n_ties = (mx.take_along_axis(a, at, axis=-1)[:, 0] for a in (best, ties))
    return Acceptance(n_accepted, token, n_ties)


def accept_residual(
    target_probs: mx.array, drafts: mx.array, draft_probs: mx.array | None, key: mx.array
) -> Acceptance:
    """Sampling: keep d with probability min(1, p(d) / q(d)), else draw from norm(max(0, p - q)).

    The emitted tokens then follow p exactly, whatever q is, as long as each draft was drawn from
    its row of q. Where a row of q holds anything but numbers (an overflow in the drafter) the draft
    is not accepted and its replacement is drawn from p itself. Nor is a draft outside the
    vocabulary accepted.

    Args:
        target_probs: p over `[anchor, d1..dK]`, shape (K + 1, V), float32.
        drafts: d1..dK, shape (K,), int32; K may be 0.
        draft_probs: q, shape (K, V), float32; None means one-hot at the drafts.
        key: Randomness of this round.
    """
    n_drafts, vocab_size = drafts.shape[0], target_probs.shape[-1]
    accept_key, draw_key = mx.random.split(key)
    column = mx.clip(drafts, 0, vocab_size - 1)  # MLX does not check bounds
    at = column + mx.arange(0, n_drafts * vocab_size, vocab_size)  # into the flattened rows
    p = mx.where(column == drafts, mx.take(target_probs, at), 0.0)  # (K,)
    u = mx.random.uniform(shape=(n_drafts,), key=accept_key)
    if draft_probs is not None:
        u = u * mx.take(draft_probs, at)
        p = mx.where(mx.isfinite(draft_probs.sum(axis=-1)), p, -mx.inf)
    n_accepted = _longest_prefix(u < p)  # u < p / q without the division; never where p <= 0

    if draft_probs is None:
        rejected = mx.take(mx.concatenate([drafts, mx.array([-1], mx.int32)]), n_accepted)
        q_row = (rejected == mx.arange(vocab_size)).astype(mx.float32)
    else:
        bonus = mx.zeros((1, vocab_size))
        q_row = mx.take(mx.concatenate([draft_probs, bonus]), n_accepted, axis=0)
        q_row = mx.where(mx.isfinite(q_row).all(), q_row, 0.0)
    next_token = draw(residual(mx.take(target_probs, n_accepted, axis=0), q_row), draw_key)
    return Acceptance(n_accepted, next_token, mx.array(0, mx.int32))


def residual(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """Distribution to draw from after a rejection: norm(max(0, p - q)).

    Args:
        target_probs: p, shape (V,), float32, sums to 1.
        draft_probs: q, same shape and dtype; all zero stands for "no draft" and gives p.

    Returns:
        Shape (V,), float32, sums to 1. If p == q the positive part is empty and p is returned.

    Raises:
        ValueError: the shapes differ.

    References:
        Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    if target_probs.shape != draft_probs.shape:
        raise ValueError(
            f"[residual] p and q must have one shape, got {target_probs.shape} "
            f"and {draft_probs.shape}."
        )
    positive = mx.maximum(target_probs - draft_probs, 0.0)
    mass = positive.sum()
    return mx.where(mass > 0, positive / mass, target_probs)


def near_tie(logits: mx.array, best: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Rows whose two best logits differ by less than rounding can: (T, V) -> (T,) bool.

    The tolerance is 8 units in the last place of the dtype at the size of the best logit: below it
    two correct computations of the same row may disagree on the arg-max.

    Args:
        logits: Shape (T, V).
        best: Arg-max of each row, shape (T,).
        dtype: The type whose rounding counts; that of `logits` without.
    """
    top = mx.take_along_axis(logits, best[:, None], axis=-1)  # (T, 1)
    others = mx.put_along_axis(logits, best[:, None], mx.array(-mx.inf, logits.dtype), axis=-1)
    second = others.max(axis=-1, keepdims=True)
    tolerance = 8 * mx.finfo(dtype or logits.dtype).eps * mx.abs(top)
    return (top - second <= tolerance)[:, 0]


def _longest_prefix(kept: mx.array) -> mx.array:
    """Number of leading True values: (K,) bool -> () int32."""
    if kept.shape[0] == 0:
        return mx.array(0, mx.int32)
    return mx.cumprod(kept.astype(mx.int32)).sum().astype(mx.int32)
