"""DFlash 2: DFlash with dynamic convolutions and a selector over each slot's best tokens.

The convolutions let neighbouring rows of a block talk (see `_layers`); the selector scores each
slot's top candidates by the token chosen before them, so a draft is one chain again. Its draft
distribution covers the candidates only. Knows nothing about the model behind.

References:
    DFlash 2, Inco AI and z-lab, August 2026 (blog).
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from spec_core import Draft, Sampling, Target, target_probs
from spec_core.sampling import draw
from spec_drafters._head import Family
from spec_drafters._linear import Matrix
from spec_drafters._vocab import or_none
from spec_drafters._weights import Weights
from spec_drafters.dflash import DFlashDrafter


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Scores candidates by what precedes them.

    Attributes:
        before: V x rank table A, indexed by the token before.
        after: V x rank table B, indexed by the candidate.
        project: H -> rank.
        n_candidates: Candidates per slot.
    """

    before: Matrix
    after: Matrix
    project: Matrix
    n_candidates: int

    def candidates(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Ids and logits of each slot's best tokens: (K, V) -> 2 x (K, n_candidates)."""
        n = min(self.n_candidates, logits.shape[-1])
        ids = mx.argpartition(-logits, n - 1, axis=-1)[:, :n]
        return ids.astype(mx.int32), mx.take_along_axis(logits, ids, axis=-1)

    def score(
        self, ids: mx.array, unary: mx.array, projected: mx.array, previous: mx.array
    ) -> mx.array:
        """Scores of one slot's candidates after a token.

        Args:
            ids: Shape (n,).
            unary: Their logits, shape (n,), float32.
            projected: The slot's projected row, shape (rank,).
            previous: Token chosen before, shape ().

        Returns:
            Shape (n,), float32.
        """
        pair = self.before.lookup(previous) * projected  # (rank,)
        return unary + (self.after.lookup(ids) * pair).astype(mx.float32).sum(axis=-1)


class DFlash2Drafter(DFlashDrafter):
    """A DFlash 2 head beside its target; arguments as `BlockDrafter` takes them."""

    name = "dflash"
    family: ClassVar[Family] = "dflash2"
    _selector: CandidateSelector

    @property
    def kin(self) -> None:
        """Drafts alone: the convolutions read the rows as those of one block."""
        return None

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward a block, then choose slot by slot among each slot's candidates."""
        hidden = self._hidden(anchor, min(cap, self.max_draft))
        logits = self._logits(hidden)
        selector, settings = self._selector, self._settings(sampling)
        ids, unary = selector.candidates(logits)  # (K, n)
        ids = self._output.vocab.to_target(ids)
        projected = selector.project(hidden)  # (K, rank)
        keys = mx.random.split(key, hidden.shape[0])
        previous = mx.array(anchor, mx.int32)
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        chosen_by: list[mx.array] = []
        for slot in range(hidden.shape[0]):
            scores = selector.score(ids[slot], unary[slot], projected[slot], previous)
            if sampling.greedy:
                chosen = mx.argmax(scores)
            else:
                rows.append(target_probs(scores[None], settings))  # (1, n)
                chosen = draw(rows[-1][0], keys[slot])
            previous = ids[slot][chosen]
            tokens.append(previous)
            chosen_by.append((rows[-1][0] if rows else scores)[chosen])
        probs = None
        if rows:
            wide = mx.zeros((len(rows), self._output.vocab.vocab_size))
            probs = mx.put_along_axis(wide, ids, mx.concatenate(rows), axis=-1)
        return Draft(or_none(mx.stack(tokens), mx.stack(chosen_by)), probs, source=self.name)

    def _take_extras(self, weights: Weights, target: Target) -> None:
        name = "candidate_selector"
        _, rank = weights.matrix_shape(f"{name}.predecessor_codebook")
        self._selector = CandidateSelector(
            before=weights.matrix(f"{name}.predecessor_codebook", target.vocab_size, rank),
            after=weights.matrix(f"{name}.successor_codebook", target.vocab_size, rank),
            project=weights.matrix(
                f"{name}.hidden_projection", rank, self.head.backbone.hidden_size
            ),
            n_candidates=self.head.selector_top_k or 16,
        )
