"""DFlash: one forward over `[anchor, mask, ...]` drafts every slot at once, each on its own.

Borrows the target's embedding table and head; slots know nothing of each other's tokens, so a
sampled draft is one independent draw per slot. Knows nothing about the model behind.

References:
    DFlash, "Block Diffusion for Flash Speculative Decoding": arXiv:2602.06036.
"""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from spec_core import Draft, Sampling, target_probs
from spec_core.sampling import draw
from spec_drafters._block_drafter import BlockDrafter
from spec_drafters._head import Family
from spec_drafters._vocab import chosen_of, or_none, soft_capped


class DFlashDrafter(BlockDrafter):
    """A DFlash head beside its target; arguments as `BlockDrafter` takes them."""

    name = "dflash"
    family: ClassVar[Family] = "dflash"

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward a block, take each slot's best token or draw from its distribution."""
        logits = self._logits(self._hidden(anchor, min(cap, self.max_draft)))
        if sampling.greedy:
            return Draft(self._best(logits), source=self.name)
        vocab = self._output.vocab
        probs = target_probs(logits, self._settings(sampling))
        drafted = draw(probs, key)
        tokens = or_none(vocab.to_target(drafted), chosen_of(probs, drafted))
        return Draft(tokens, vocab.spread(probs), source=self.name)

    @property
    def kin(self) -> object | None:
        """The head's output matrix, which all forks share."""
        return self._output

    def _greedy_rows(self, anchors: Sequence[int], hidden: mx.array) -> tuple[mx.array, None]:
        return self._best(self._logits(hidden)), None

    def _best(self, logits: mx.array) -> mx.array:
        """Target ids of the best token of each row: (K, Vd) -> (K,)."""
        drafted = mx.argmax(logits, axis=-1).astype(mx.int32)
        return or_none(self._output.vocab.to_target(drafted), chosen_of(logits, drafted))

    def _logits(self, hidden: mx.array) -> mx.array:
        """Draft logits with the output transform that the head declares: (K, H) -> (K, Vd)."""
        logits = self._output(hidden)
        if self.head.draft_multiplier != 1.0:
            logits = logits * self.head.draft_multiplier
        return soft_capped(logits, self.head.draft_softcap)
