"""DSpark: one forward over a block, then a cheap chain that lets each draft see the one before.

The body gives a hidden row per slot; the lm_head turns rows into logits, a low-rank Markov bias is
added slot by slot while drafting, and a small head estimates each draft's chance. Reads the target
through its taps, its raw embedding table and its raw head; knows nothing about the model behind.

References:
    DSpark as released with DeepSpec (deepseek-ai). Losslessness: arXiv:2211.17192.
"""

from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, Target, target_probs
from spec_core.host import host_int
from spec_core.sampling import draw
from spec_drafters._block_drafter import BlockDrafter
from spec_drafters._checkpoint import Checkpoint
from spec_drafters._head import Family
from spec_drafters._markov import ConfidenceHead, MarkovHead, load_confidence, load_markov
from spec_drafters._vocab import chosen_of, or_none, soft_capped
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
    _markov: MarkovHead | None = None
    _confidence: ConfidenceHead | None = None

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
        super().__init__(
            checkpoint, target, bits=bits, window=window, truncate=truncate, dtype=dtype
        )
        if confidence_threshold > 0 and self._confidence is None:
            raise LoadError(
                "[dspark] A confidence threshold needs a confidence head, got a checkpoint "
                "without one. Leave the threshold at 0."
            )
        self._threshold = confidence_threshold

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward a block and walk the chain.

        Reads nothing from the device, unless a confidence threshold is set: then it reads one
        integer, the length of the draft.
        """
        hidden = self._hidden(anchor, min(cap, self.max_draft))
        logits = self._output(hidden)
        if self._output.is_own:  # a borrowed head is used raw: its transforms are the target's
            logits = soft_capped(logits, self.head.own_softcap)
        tokens, probs, embedded = self._walk(anchor, hidden, logits, sampling, key)
        confidence = None
        if self._confidence is not None:
            confidence = self._confidence(hidden, embedded)
        draft = Draft(tokens, probs, confidence, self.name)
        return self._cut(draft, confidence) if self._threshold > 0 else draft

    def _take_extras(self, weights: Weights, target: Target) -> None:
        n_draft, rank = self._output.vocab.n_draft, 0
        if self.head.markov is not None:
            self._markov = load_markov(weights, self.head, target.vocab_size, n_draft)
            rank = self._markov.rank
        self._confidence = load_confidence(weights, self.head, rank)

    def _walk(
        self,
        anchor: int,
        hidden: mx.array,
        logits: mx.array,
        sampling: Sampling,
        key: mx.array,
    ) -> tuple[mx.array, mx.array | None, mx.array | None]:
        """Draft slot by slot: target ids (K,), q (K, V), and W1 of each slot's predecessor."""
        n_drafts, settings = logits.shape[0], self._settings(sampling)
        vocab, markov = self._output.vocab, self._markov
        keys = mx.random.split(key, n_drafts)
        previous = mx.array([anchor], mx.int32)
        state = mx.zeros((1, markov.rank if markov else 1), hidden.dtype)
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        chosen_by: list[mx.array] = []
        embedded: list[mx.array] = []
        for slot in range(n_drafts):
            row = logits[slot : slot + 1]  # (1, Vd)
            if markov is not None:
                embedded.append(markov.before.lookup(previous))
                bias, state = markov.bias(embedded[-1], hidden[slot : slot + 1], state)
                row = row + bias.astype(mx.float32)
            if sampling.greedy:
                drafted = mx.argmax(row, axis=-1)
            else:
                rows.append(target_probs(row, settings))
                drafted = draw(rows[-1], keys[slot])
            chosen_by.append(chosen_of(rows[-1] if rows else row, drafted))
            previous = vocab.to_target(drafted.astype(mx.int32))
            tokens.append(previous)
        drafts = or_none(mx.concatenate(tokens), mx.concatenate(chosen_by))
        probs = vocab.spread(mx.concatenate(rows)) if rows else None
        return drafts, probs, mx.concatenate(embedded) if embedded else None

    def _cut(self, draft: Draft, confidence: mx.array | None) -> Draft:
        """Keep the slots before the first one below the threshold.

        A slot's confidence is known before its token is drawn, so cutting costs no losslessness.
        """
        assert confidence is not None
        sure = ~(confidence < self._threshold)  # NaN stays, for the loop to see
        confident = mx.cumprod(sure.astype(mx.int32))
        n = host_int(confident.sum())  # sync: the number of drafts shapes the verify block
        probs = None if draft.probs is None else draft.probs[:n]
        return replace(draft, tokens=draft.tokens[:n], probs=probs, confidence=confidence[:n])
