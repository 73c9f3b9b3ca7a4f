"""Acceptance length, acceptance rate and speed, computed from rounds."""

import time
from dataclasses import dataclass

from spec_core.types import FinishReason, Round


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one generation.

    Attributes:
        n_tokens: Emitted tokens.
        n_rounds: Target forwards after the prefill.
        n_drafted: Drafts sent to verify.
        n_accepted: Drafts that the accept rule took.
        acceptance_length: Mean of n_accepted + 1 over rounds, a truncated last one left out;
            1.0 = no gain.
        acceptance_rate: n_accepted / n_drafted; 0.0 without drafts.
        accepted_by_position: Share of the drafts at position 1, 2, .. that were accepted.
        near_ties: Greedy rows whose two best logits tie within rounding.
        prefill_s: Seconds until the first token.
        decode_s: Seconds after it.
        tokens_per_second: Tokens after the first one, per second of decode_s.
        finish_reason: Why the text ended; None when it was left early.
    """

    n_tokens: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    acceptance_length: float
    acceptance_rate: float
    accepted_by_position: tuple[float, ...]
    near_ties: int
    prefill_s: float
    decode_s: float
    tokens_per_second: float
    finish_reason: FinishReason | None


class StatsMeter:
    """Collects rounds; create it just before the first one is asked for.

    The clock stops at the last round, so what the caller does afterwards is not counted.
    """

    def __init__(self) -> None:
        self._created = self._first = self._last = time.perf_counter()
        self._n_tokens = self._n_rounds = self._near_ties = 0
        self._full_rounds = self._full_kept = 0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._finish_reason: FinishReason | None = None

    def add(self, round_: Round) -> None:
        """Count one round."""
        self._last = time.perf_counter()
        self._n_tokens += len(round_.tokens)
        self._near_ties += round_.near_ties
        self._finish_reason = round_.finish_reason
        if round_.kind == "prefill":
            self._first = self._last
            return
        self._n_rounds += 1
        if not round_.truncated:
            self._full_rounds += 1
            self._full_kept += round_.n_accepted + 1
        while len(self._drafted_at) < round_.n_drafted:
            self._drafted_at.append(0)
            self._accepted_at.append(0)
        for i in range(round_.n_drafted):
            self._drafted_at[i] += 1
            self._accepted_at[i] += i < round_.n_accepted

    def result(self) -> Stats:
        """Figures of the rounds added so far."""
        drafted, accepted = sum(self._drafted_at), sum(self._accepted_at)
        decode_s = self._last - self._first
        return Stats(
            n_tokens=self._n_tokens,
            n_rounds=self._n_rounds,
            n_drafted=drafted,
            n_accepted=accepted,
            acceptance_length=self._full_kept / self._full_rounds if self._full_rounds else 1.0,
            acceptance_rate=accepted / drafted if drafted else 0.0,
            accepted_by_position=tuple(
                a / d for a, d in zip(self._accepted_at, self._drafted_at, strict=True)
            ),
            near_ties=self._near_ties,
            prefill_s=self._first - self._created,
            decode_s=decode_s,
            tokens_per_second=max(self._n_tokens - 1, 0) / decode_s if decode_s > 0 else 0.0,
            finish_reason=self._finish_reason,
        )
