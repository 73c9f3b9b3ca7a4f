"""Lookup where the newest tokens occurred before, another drafter everywhere else.

Copied drafts cost nothing to make and run long where a text repeats itself. Where they are accepted
less than the other drafter's, lookup is parked and probed again later. Knows nothing about models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from spec_core import Draft, Drafter, Sampling, Target, TargetOutput, registry
from spec_core.lending import Forkable, Lender
from spec_core.protocols import (
    DraftAsk,
    DraftsTogether,
    Observation,
    ObservesTogether,
    Shortenable,
)
from spec_drafters.lookup import LookupDrafter


@dataclass(frozen=True, slots=True)
class HybridState:
    """Snapshots of both drafters."""

    lookup: Any
    other: Any


class HybridDrafter:
    """A drafter with lookup in front.

    Args:
        other: Drafts where lookup finds nothing or is parked.
        lookup: Drafts where the newest tokens occurred before; one that asks for a match of 4
            tokens without.
    """

    def __init__(self, other: Drafter, lookup: LookupDrafter | None = None) -> None:
        self.other = other
        self.name = f"lookup+{other.name}"
        self._lookup = lookup or LookupDrafter(min_match=4)
        self._lender = Lender(other)
        self.taps = other.taps
        self.max_draft = max(other.max_draft, self._lookup.max_draft)
        self._rivalry = _Rivalry()
        self._last: str | None = None  # who made the draft in flight

    @classmethod
    def load(cls, path: Path | str, target: Target, **options: Any) -> "HybridDrafter":
        """Load the other drafter from its folder, with the installed loader, and go in front."""
        load_drafter = registry.load(registry.LOADERS, "drafter")
        return load_drafter(path, target, lookup_drafts=True, **options)

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Lookup's draft if it has one and is worth it, else the other drafter's."""
        ask = DraftAsk(self, anchor, cap, sampling, key)
        return self._copied(ask) or self._for_other(ask).alone()

    @property
    def kin(self) -> object | None:
        """What forks share, if their other drafters draft together."""
        other = self.other
        together = isinstance(other, DraftsTogether) and other.kin is not None
        return self._lender if together else None

    def draft_together(self, asks: Sequence[DraftAsk]) -> list[Draft | None]:
        """Each one's own lookup first; those that find nothing go on together."""
        hybrids = [cast(HybridDrafter, ask.drafter) for ask in asks]
        drafts = [one._copied(ask) for one, ask in zip(hybrids, asks, strict=True)]
        left = [at for at, draft in enumerate(drafts) if draft is None]
        if left:
            others = [hybrids[at]._for_other(asks[at]) for at in left]
            together = cast(DraftsTogether, others[0].drafter).draft_together(others)
            for at, draft in zip(left, together, strict=True):
                drafts[at] = draft
        return drafts

    def _copied(self, ask: DraftAsk) -> Draft | None:
        """Lookup's draft, if it has one and is worth it."""
        if self._rivalry.may_look_up():
            copied = self._lookup.draft(ask.anchor, ask.cap, sampling=ask.sampling, key=ask.key)
            if copied.n_drafted:
                self._last = "lookup"
                return copied
        self._last = "other"
        return None

    def _for_other(self, ask: DraftAsk) -> DraftAsk:
        """The same ask of the other drafter."""
        return replace(ask, drafter=self.other, cap=min(ask.cap, self.other.max_draft))

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Both observe; what the last draft brought decides about parking."""
        self._note(tokens, output)
        self.other.observe(tokens, output)

    def observe_together(self, observations: Sequence[Observation]) -> None:
        """The other drafters observe together, then each lookup by itself."""
        hybrids = [cast(HybridDrafter, one.drafter) for one in observations]
        rows = list(zip(hybrids, observations, strict=True))
        others = [replace(one, drafter=hybrid.other) for hybrid, one in rows]
        cast(ObservesTogether, others[0].drafter).observe_together(others)
        for hybrid, one in rows:
            hybrid._note(one.tokens, one.output)

    def _note(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """What the last draft brought, and the rows for lookup."""
        if self._last is not None:
            self._rivalry.record(self._last, len(tokens) - 1)
            self._last = None
        self._lookup.observe(tokens, output)

    def fork(self) -> "HybridDrafter":
        """Another one with empty contexts; the other drafter is forked, or used by turns."""
        if self.other is self._lender.drafter and not isinstance(self.other, Forkable):
            self.other = self._lender.user = self._lender.lend()
        other = HybridDrafter(self._lender.lend(), self._lookup.fork())
        other._lender = self._lender
        return other

    def reset(self) -> None:
        """Forget the sequence."""
        self._lookup.reset()
        self.other.reset()
        self._rivalry = _Rivalry()
        self._last = None

    def state(self) -> HybridState:
        """Snapshots of both; parking is not part of it."""
        return HybridState(self._lookup.state(), self.other.state())

    def shortened(self, state: HybridState, n_rows: int) -> HybridState | None:
        """A snapshot as it was after its first rows; None where the other drafter cannot say."""
        if not isinstance(self.other, Shortenable):
            return None
        other = self.other.shortened(state.other, n_rows)
        return None if other is None else HybridState(state.lookup[:n_rows], other)

    def restore(self, state: HybridState) -> None:
        """Go on from a snapshot."""
        self._lookup.restore(state.lookup)
        self.other.restore(state.other)
        self._rivalry = _Rivalry()
        self._last = None


class _Rivalry:
    """Parks lookup while its drafts bring fewer tokens than the other drafter's.

    Both averages count accepted tokens a round and forget with a half-life of about three rounds.
    """

    _FIRST_NAP = 16
    _LONGEST_NAP = 128

    def __init__(self) -> None:
        self._mean: dict[str, float | None] = {"lookup": None, "other": None}
        self._nap = self._FIRST_NAP
        self._left = 0
        self._may: bool | None = None  # the answer for this round, once it has been asked

    def may_look_up(self) -> bool:
        """False while lookup is parked; counts the round, however often it is asked in it."""
        if self._may is None:
            self._may = self._left == 0
            self._left = max(self._left - 1, 0)
        return self._may

    def record(self, source: str, n_accepted: int) -> None:
        """Count a round of one of the two; it ends."""
        self._may = None
        mean = self._mean[source]
        mean = float(n_accepted) if mean is None else mean + 0.25 * (n_accepted - mean)
        self._mean[source] = mean
        rival = self._mean["other"]
        if source != "lookup" or rival is None:
            return
        if mean >= rival:
            self._nap = self._FIRST_NAP
            return
        self._left = self._nap
        self._nap = min(2 * self._nap, self._LONGEST_NAP)
        self._mean["lookup"] = None  # the next probe speaks for itself
