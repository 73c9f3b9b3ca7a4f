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


class PositionCounts:
    """Drafts sent and accepted at position 1, 2, .. of a draft."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count one round."""
        while len(self._drafted) < n_drafted:
            self._drafted.append(0)
            self._accepted.append(0)
        for i in range(n_drafted):
            self._drafted[i] += 1
            self._accepted[i] += i < n_accepted

    @property
    def n_drafted(self) -> int:
        """Drafts sent to verify."""
        return sum(self._drafted)

    @property
    def n_accepted(self) -> int:
        """Drafts accepted."""
        return sum(self._accepted)

    @property
    def rate(self) -> float:
        """n_accepted / n_drafted; 0.0 without drafts."""
        return self.n_accepted / self.n_drafted if self._drafted else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the drafts at each position that were accepted."""
        return tuple(a / d for a, d in zip(self._accepted, self._drafted, strict=True))


class StatsMeter:
    """Collects rounds; create it just before the first one is asked for.

    The clock stops at the last round, so what the caller does afterwards is not counted.
    """

    def __init__(self) -> None:
        self._created = self._first = self._last = time.perf_counter()
        self._n_tokens = self._n_rounds = self._near_ties = 0
        self._full_rounds = self._full_kept = 0
        self._positions = PositionCounts()
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
        self._positions.add(round_.n_drafted, round_.n_accepted)

    def result(self) -> Stats:
        """Figures of the rounds added so far."""
        positions = self._positions
        decode_s = self._last - self._first
        return Stats(
            n_tokens=self._n_tokens,
            n_rounds=self._n_rounds,
            n_drafted=positions.n_drafted,
            n_accepted=positions.n_accepted,
            acceptance_length=self._full_kept / self._full_rounds if self._full_rounds else 1.0,
            acceptance_rate=positions.rate,
            accepted_by_position=positions.by_position,
            near_ties=self._near_ties,
            prefill_s=self._first - self._created,
            decode_s=decode_s,
            tokens_per_second=max(self._n_tokens - 1, 0) / decode_s if decode_s > 0 else 0.0,
            finish_reason=self._finish_reason,
        )
