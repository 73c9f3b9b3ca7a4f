"""The draft vocabulary: all tokens of the target, or a subset with a map to the target's ids."""

from dataclasses import dataclass

import mlx.core as mx

from spec_core import LoadError, Target
from spec_drafters._linear import Matrix
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """How draft ids become target ids.

    Attributes:
        vocab_size: V of the target.
        n_draft: Vd.
        target_ids: Shape (Vd,), int32; None when the two vocabularies are one.
    """

    vocab_size: int
    n_draft: int
    target_ids: mx.array | None = None

    def to_target(self, draft_ids: mx.array) -> mx.array:
        """Draft ids of any shape as target ids."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def spread(self, probs: mx.array) -> mx.array:
        """Rows over Vd as rows over V, zero at tokens that cannot be drafted: (K, V)."""
        if self.target_ids is None:
            return probs
        wide = mx.zeros((probs.shape[0], self.vocab_size), probs.dtype)
        ids = mx.broadcast_to(self.target_ids, probs.shape)
        return mx.put_along_axis(wide, ids, probs, axis=-1)


def read_vocab(weights: Weights, vocab_size: int, n_draft: int) -> DraftVocab:
    """The map of a head with n_draft rows in its lm_head.

    `d2t` holds offsets: target id = draft id + d2t[draft id].

    Raises:
        LoadError: a reduced vocabulary without a map that is complete, in range and without
            repetition, or a map where there is nothing to reduce.
    """
    where = weights.where
    if n_draft == vocab_size:
        if weights.wants("d2t"):
            raise LoadError(
                f'[{where}] A "d2t" map belongs to a reduced vocabulary, got one with all '
                f"{vocab_size} tokens. Use a consistent export of the drafter."
            )
        return DraftVocab(vocab_size, n_draft)
    if not weights.has("d2t"):
        raise LoadError(
            f'[{where}] A draft vocabulary of {n_draft} of {vocab_size} tokens needs a "d2t" map, '
            "got none. Use a complete export of the drafter."
        )
    offsets = weights.offsets("d2t")
    ids = [i + offset for i, offset in enumerate(offsets)]
    problem = None
    if len(ids) != n_draft:
        problem = f"{len(ids)} entries"
    elif min(ids) < 0 or max(ids) >= vocab_size:
        problem = f"target ids {min(ids)}..{max(ids)}"
    elif len(set(ids)) < n_draft:
        problem = f"{n_draft - len(set(ids))} repeated target ids"
    elif not any(offsets):
        problem = "all zeros"
    if problem is not None:
        raise LoadError(
            f'[{where}] "d2t" must map {n_draft} draft ids to different target ids in '
            f"0..{vocab_size - 1} by offsets, got {problem}. Use another export of the drafter."
        )
    return DraftVocab(vocab_size, n_draft, mx.array(ids, mx.int32))


class OutputHead:
    """From final rows to raw logits: the head's own matrix, or the target's.

    Args:
        weights: Tensors of the head; takes "lm_head" and "d2t".
        target: Lends its raw head if there is none.
        hidden_size: H of the drafter.
    """

    def __init__(self, weights: Weights, target: Target, hidden_size: int) -> None:
        self._target = target
        self._own: Matrix | None = None
        n_draft = target.vocab_size
        if weights.has("lm_head.weight"):
            n_draft = weights.matrix_shape("lm_head")[0]
            self._own = weights.matrix("lm_head", n_draft, hidden_size)
        else:
            weights.leave("lm_head")
            check_width(weights.where, "lm_head", hidden_size, target)
        self.vocab = read_vocab(weights, target.vocab_size, n_draft)

    @property
    def is_own(self) -> bool:
        """True when the checkpoint brought its own matrix."""
        return self._own is not None

    def __call__(self, hidden: mx.array) -> mx.array:
        """Raw logits: (K, H) -> (K, Vd), float32."""
        rows = self._target.unembed(hidden) if self._own is None else self._own(hidden)
        return rows.astype(mx.float32)


def or_none(drafted: mx.array, scores: mx.array) -> mx.array:
    """Drafted ids, -1 where the number that one was chosen by is NaN or infinite.

    Args:
        drafted: Target ids, shape (K,).
        scores: Their logits or probabilities, shape (K,).
    """
    return mx.where(mx.isfinite(scores), drafted, -1)


def chosen_of(rows: mx.array, drafted: mx.array) -> mx.array:
    """The entry of each row at an id: (K, V) and (K,) -> (K,)."""
    return mx.take_along_axis(rows, drafted[:, None], axis=-1)[:, 0]


def check_width(where: str, part: str, hidden_size: int, target: Target) -> None:
    """Refuse to borrow a part of a target that has another width.

    Raises:
        LoadError: the widths differ.
    """
    if hidden_size != target.hidden_size:
        raise LoadError(
            f'[{where}] A head without "{part}" borrows the target\'s and must have its width, '
            f"got {hidden_size} and {target.hidden_size}. Use the drafter made for this target."
        )


def soft_capped(logits: mx.array, cap: float | None) -> mx.array:
    """Cap * tanh(logits / cap), or the logits without a cap."""
    return logits if cap is None else cap * mx.tanh(logits / cap)
