"""What passes between enqueuing a target's forward and reading what came of it.

A forward and its accept rule are enqueued as a `Step`; one device read of `packed` makes it an
`Outcome`. The loop and rows that share a forward use the same. Knows nothing about rounds.
"""

from dataclasses import dataclass

import mlx.core as mx

from spec_core.types import Acceptance, Draft, FinishReason, TargetOutput

NO_DRAFTS = Draft(mx.array([], mx.int32), source="target")  # data, so any thread may read it
HEADER = 4  # n_accepted, next_token, near_ties, bad rows; then the drafts, then their confidence


@dataclass(slots=True)
class Forwarded:
    """A draft and what the target made of it; what is needed once the outcome is read."""

    draft: Draft
    output: TargetOutput


@dataclass(slots=True)
class Step(Forwarded):
    """A target forward whose outcome has not been read yet."""

    outcome: Acceptance
    packed: mx.array  # (HEADER + K,) int32, or (HEADER + 2K,) with confidence


@dataclass(slots=True)
class Outcome:
    """A step as the host reads it, cut at a stop or the limit."""

    tokens: list[int]
    text: str
    reason: FinishReason | None
    drafts: list[int]
    n_accepted: int
    near_ties: int
    confidence: tuple[float, ...] | None = None


def check_draft(draft: Draft, drafter: str, cap: int, vocab_size: int) -> None:
    """Refuse a draft that breaks the contract; MLX would read past the end of its arrays.

    Raises:
        ValueError: it is longer than `cap`, or an array has another shape or type.
    """
    n, probs, confidence = draft.n_drafted, draft.probs, draft.confidence
    if n > cap:
        raise ValueError(f'[draft] Drafter "{drafter}" must propose at most {cap} tokens, got {n}.')
    if (
        draft.tokens.ndim != 1
        or not mx.issubdtype(draft.tokens.dtype, mx.integer)
        or (probs is not None and probs.shape != (n, vocab_size))
        or (confidence is not None and confidence.shape != (n,))
    ):
        raise ValueError(
            f'[draft] Drafter "{drafter}" must give K whole numbers, (K, {vocab_size}) probs or '
            f"None, and K confidences or None, got {draft.tokens.shape} of {draft.tokens.dtype}, "
            f"{getattr(probs, 'shape', None)} and {getattr(confidence, 'shape', None)}."
        )


def n_bad_rows(logits: mx.array, n_accepted: mx.array) -> mx.array:
    """Used rows without a distribution: logits (B, T, V), counts (B,) -> (B,) int32.

    A row without NaN whose best logit is finite has one; -inf masks a token.
    """
    sound = mx.isfinite(logits.max(axis=-1)) & ~mx.isnan(logits).any(axis=-1)
    n_bad = mx.cumsum((~sound).astype(mx.int32), axis=-1)
    return mx.take_along_axis(n_bad, n_accepted[:, None], axis=-1)[:, 0]
