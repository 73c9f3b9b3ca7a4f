"""The sequential half of DSpark: slot by slot, each draft sees the one before.

Works on the rows that some body made of a block; knows nothing about that body.

References:
    DSpark as released with DeepSpec (deepseek-ai). Losslessness: arXiv:2211.17192.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, target_probs
from spec_core.host import host_int
from spec_core.sampling import draw
from spec_drafters._markov import ConfidenceHead, MarkovHead
from spec_drafters._vocab import DraftVocab, chosen_of, or_none

NAME = "dspark"


@dataclass(frozen=True, slots=True)
class Chain:
    """What turns logits of all slots into a draft.

    Attributes:
        vocab: From draft ids to target ids.
        markov: Bias from the token before, or None.
        confidence: Chance of each draft, or None.
        threshold: Cut before the first slot whose confidence is lower; 0 never cuts.
    """

    vocab: DraftVocab
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    threshold: float = 0.0

    def draft(
        self,
        anchor: int,
        hidden: mx.array,
        logits: mx.array,
        sampling: Sampling,
        key: mx.array,
    ) -> Draft:
        """Draft a token for every row.

        Reads nothing from the device, unless a threshold is set: then it reads one integer, the
        length of the draft.

        Args:
            anchor: Target id before the first slot.
            hidden: Rows that the Markov and confidence heads read, shape (K, H).
            logits: Before the Markov bias, shape (K, Vd), float32.
            sampling: What drafts are drawn with.
            key: Randomness.
        """
        keys = None if sampling.greedy else mx.random.split(key, logits.shape[0])
        tokens, probs, embedded = self._walk([anchor], hidden, logits, sampling, keys)
        confidence = None if self.confidence is None else self.confidence(hidden, embedded)
        draft = Draft(tokens, probs, confidence, NAME)
        return self._cut(draft, confidence) if self.threshold > 0 else draft

    def draft_rows(
        self, anchors: Sequence[int], hidden: mx.array, logits: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Draft greedily for R sequences at once; reads nothing from the device.

        Args:
            anchors: Target ids before the first slots, R of them.
            hidden: Rows of slot 0 of all sequences, then of slot 1, ..., shape (K * R, H).
            logits: Before the Markov bias, in the same order, shape (K * R, Vd), float32.

        Returns:
            Target ids, and confidence or None, in the same order, shape (K * R,).
        """
        tokens, _, embedded = self._walk(anchors, hidden, logits, Sampling(), None)
        if self.confidence is None:
            return tokens, None
        return tokens, self.confidence(hidden, embedded, len(anchors))

    def _walk(
        self,
        anchors: Sequence[int],
        hidden: mx.array,
        logits: mx.array,
        sampling: Sampling,
        keys: mx.array | None,
    ) -> tuple[mx.array, mx.array | None, mx.array | None]:
        """Draft slot by slot: target ids (K,), q (K, V), and W1 of each slot's predecessor.

        Greedy drafts of R sequences go side by side, R rows a slot; only one is drawn at a time.
        """
        n_seq, markov = len(anchors), self.markov
        previous = mx.array(list(anchors), mx.int32)  # (R,)
        state = mx.zeros((n_seq, markov.rank if markov else 1), hidden.dtype)
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        chosen_by: list[mx.array] = []
        embedded: list[mx.array] = []
        for slot in range(logits.shape[0] // n_seq):
            start, end = slot * n_seq, (slot + 1) * n_seq
            row = logits[start:end]  # (R, Vd)
            if markov is not None:
                embedded.append(markov.before.lookup(previous))
                bias, state = markov.bias(embedded[-1], hidden[start:end], state)
                row = row + bias.astype(mx.float32)
            if keys is None:
                drafted = mx.argmax(row, axis=-1)
            else:
                rows.append(target_probs(row, sampling))
                drafted = draw(rows[-1], keys[slot])
            chosen_by.append(chosen_of(rows[-1] if rows else row, drafted))
            previous = self.vocab.to_target(drafted.astype(mx.int32))
            tokens.append(previous)
        drafts = or_none(mx.concatenate(tokens), mx.concatenate(chosen_by))
        probs = self.vocab.spread(mx.concatenate(rows)) if rows else None
        return drafts, probs, mx.concatenate(embedded) if embedded else None

    def _cut(self, draft: Draft, confidence: mx.array | None) -> Draft:
        """Keep the slots before the first one below the threshold.

        A slot's confidence is known before its token is drawn, so cutting costs no losslessness.
        """
        assert confidence is not None
        sure = ~(confidence < self.threshold)  # NaN stays, for the loop to see
        confident = mx.cumprod(sure.astype(mx.int32))
        n = host_int(confident.sum())  # sync: the number of drafts shapes the verify block
        probs = None if draft.probs is None else draft.probs[:n]
        return replace(draft, tokens=draft.tokens[:n], probs=probs, confidence=confidence[:n])


def refuse_threshold_without_head(threshold: float, confidence: ConfidenceHead | None) -> None:
    """Refuse a threshold that nothing could be compared with.

    Raises:
        LoadError: the threshold is above 0 and there is no confidence head.
    """
    if threshold > 0 and confidence is None:
        raise LoadError(
            "[dspark] A confidence threshold needs a confidence head, got a checkpoint "
            "without one. Leave the threshold at 0."
        )
