"""The data that packages hand to each other: frozen, no behaviour beyond derived counts.

Axis letters: T rows in this call, K drafts, V vocabulary, H hidden size.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

FinishReason = Literal["stop", "length"]
RoundKind = Literal["prefill", "plain", "verify"]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes to follow the anchor.

    Attributes:
        tokens: Shape (K,), int32; K = 0 means "nothing to propose", which costs a plain step. An id
            below 0 says that the drafter computed NaN or infinity there: it is rejected, and the
            loop warns and drafts no more in that text.
        probs: Draft probabilities q, shape (K, V), float32, each row the distribution that its
            token was drawn from. None when the drafter is deterministic (q is one-hot).
        confidence: Estimated probability that each draft is accepted, shape (K,), float32, or None.
        source: Who proposed, as shown in statistics ("lookup"); the drafter's name if empty.
    """

    tokens: mx.array
    probs: mx.array | None = None
    confidence: mx.array | None = None
    source: str = ""

    @property
    def n_drafted(self) -> int:
        """K, known without reading the device."""
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one target forward returns; arrays may be unevaluated.

    Attributes:
        logits: Shape (T, V) from `verify`; shape (1, V), the last row's, from `prefill`.
        taps: One array of shape (T, H) per tapped layer, ascending; empty without taps.
    """

    logits: mx.array
    taps: tuple[mx.array, ...] = ()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the accept rule decides, on the device.

    Attributes:
        n_accepted: Shape (), int32: length of the longest accepted prefix, 0..K.
        next_token: Shape (), int32: the correction after a rejection, the bonus token otherwise.
        near_ties: Shape (), int32: rows among the used ones whose two best logits tie within
            rounding (greedy only; 0 when sampling).
    """

    n_accepted: mx.array
    next_token: mx.array
    near_ties: mx.array


@dataclass(frozen=True, slots=True)
class Round:
    """One round as its consumer sees it: already committed.

    Attributes:
        tokens: Emitted ids, at least one. The last one is the next anchor: it is not in the
            target's cache yet.
        text: Text that became final with this round (empty without a tokenizer; text that may
            still turn into a stop string, or half a character, is held back).
        kind: "prefill" for the token drawn from the prompt's logits, "plain" for a one-row
            forward, "verify" for a block.
        n_drafted: Drafts sent to verify.
        n_accepted: Drafts the accept rule took; a stop may leave fewer of them in `tokens`.
        source: The draft's source, or "target".
        near_ties: Greedy rows whose two best logits tie within rounding.
        elapsed_s: Wall time of the round in seconds, without what its consumer did before it; a
            plain step that was enqueued ahead counts from the round before it.
        finish_reason: None until the last round.
        logits: Target logits that the tokens were taken from, shape (len(tokens), V), before
            temperature and penalties, for log-probabilities; None unless asked for.
        offset: Tokens in the target's cache after this round, N.
        cap: Drafts asked for; 0 for a step that asked for none. A drafter may have given fewer.
        confidence: The draft's confidence, one number per draft; None when it has none. It comes
            over with the round's one read, so it is known only after the verify.
    """

    tokens: tuple[int, ...]
    text: str
    kind: RoundKind
    n_drafted: int
    n_accepted: int
    source: str
    near_ties: int
    elapsed_s: float
    finish_reason: FinishReason | None
    logits: mx.array | None = None
    offset: int = 0
    cap: int = 0
    confidence: tuple[float, ...] | None = None

    @property
    def truncated(self) -> bool:
        """True when a stop or the token limit cut tokens that the round had accepted."""
        return len(self.tokens) < self.n_accepted + 1
