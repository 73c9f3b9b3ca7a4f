"""DSpark: one forward over a block, then a cheap chain that lets each draft see the one before.

The body gives a hidden row per slot; the lm_head turns rows into logits, a low-rank Markov bias is
added slot by slot while drafting, and a small head estimates each draft's chance. Reads the target
through its taps, its raw embedding table and its raw head; knows nothing about the model behind.

References:
    DSpark as released with DeepSpec (deepseek-ai). Losslessness: arXiv:2211.17192.
"""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from spec_core import Draft, Sampling, Target
from spec_drafters._block_drafter import BlockDrafter
from spec_drafters._chain import Chain, refuse_threshold_without_head
from spec_drafters._checkpoint import Checkpoint
from spec_drafters._head import Family
from spec_drafters._markov import load_confidence, load_markov
from spec_drafters._vocab import soft_capped
from spec_drafters._weights import Weights


class DSparkDrafter(BlockDrafter):
    """A DSpark head beside its target.

    Args:
        checkpoint: An opened checkpoint.
        target: The model it drafts for.
        bits: 4 or 8 quantises linears and embeddings at load; 16 computes with plain matrices.
        window: Context rows that a bidirectional head sees, the newest; 0 for all.
        confidence_threshold: Cut the draft before the first slot whose confidence is lower. Above
            0 each draft waits for the device once, to learn its own length.
        truncate: Draw from the request's top-k, top-p and min-p too, not from temperature alone.
        dtype: Compute type; the target's without.

    Raises:
        LoadError: the checkpoint is no DSpark head, or does not fit the target.
    """

    name = "dspark"
    family: ClassVar[Family] = "dspark"
    _chain: Chain

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        bits: int = 4,
        window: int = 4096,
        confidence_threshold: float = 0.0,
        truncate: bool = True,
        dtype: mx.Dtype | None = None,
    ) -> None:
        self._threshold = confidence_threshold
        super().__init__(
            checkpoint, target, bits=bits, window=window, truncate=truncate, dtype=dtype
        )

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward a block and walk the chain.

        Reads nothing from the device, unless a confidence threshold is set: then it reads one
        integer, the length of the draft.
        """
        hidden = self._hidden(anchor, min(cap, self.max_draft))
        return self._chain.draft(
            anchor, hidden, self._logits(hidden), self._settings(sampling), key
        )

    @property
    def kin(self) -> object | None:
        """The head's output matrix, which all forks share; None where a draft reads the device."""
        return None if self._threshold > 0 else self._output

    def _greedy_rows(
        self, anchors: Sequence[int], hidden: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        return self._chain.draft_rows(anchors, hidden, self._logits(hidden))

    def _logits(self, hidden: mx.array) -> mx.array:
        """Before the Markov bias: (K, H) -> (K, Vd)."""
        logits = self._output(hidden)
        # A borrowed head is used raw: its transforms are the target's.
        return soft_capped(logits, self.head.own_softcap) if self._output.is_own else logits

    def _take_extras(self, weights: Weights, target: Target) -> None:
        vocab, width = self._output.vocab, self.head.backbone.hidden_size
        markov = None
        if self.head.markov is not None:
            markov = load_markov(
                weights,
                self.head.markov,
                width,
                vocab_size=target.vocab_size,
                n_draft=vocab.n_draft,
            )
        rank, temperatures = markov.rank if markov else 0, self.head.temperatures
        confidence = load_confidence(weights, width, rank, temperatures=temperatures)
        refuse_threshold_without_head(self._threshold, confidence)
        self._chain = Chain(vocab, markov, confidence, self._threshold)
