"""How often drafts are accepted, by position, as averages that forget.

Two averages per position: a slow one says what this drafter is like, a fast one what it is doing
now, and the slow one is the fast one's prior. A position never reached takes the rate of the one
before it: measured heads are about level in the position. One not reached lately, because less was
asked for, follows it: what makes a text easy does so for all positions. Knows nothing about costs.
"""

import math
from collections.abc import Sequence

from spec_calibrate.odds import logit, sigmoid

_FAST_HALF_LIFE = 32.0  # rounds of one source
_RARE_HALF_LIFE = 200.0  # for what happens seldom: that a lookup finds something
_SLOW_HALF_LIFE = 400.0
_FAST_PRIOR = 8.0  # observations that the slow average counts for
_SLOW_PRIOR = 8.0  # observations that the assumed rates count for
_BORROWED = 0.8  # share of how far the position before is from its usual odds now
_EDGE = 0.01  # rates are kept this far from 0 and 1 where odds are asked for


class Frequency:
    """Shares of successes by position, each with its number of recent trials.

    Args:
        prior: Assumed shares; the last one holds for all further positions.
        half_life: Rounds in which the fast average forgets half.
        alike: Positions resemble each other, so one seldom reached borrows from the one before.
    """

    def __init__(
        self, prior: Sequence[float], *, half_life: float = _FAST_HALF_LIFE, alike: bool = True
    ) -> None:
        self._prior = tuple(prior)
        self._half_life = half_life
        self._alike = alike
        self._fast: list[list[float]] = []  # per position: successes, trials
        self._slow: list[list[float]] = []

    def age(self, rounds: float = 1.0) -> None:
        """Let the fast average forget."""
        keep = 0.5 ** (rounds / self._half_life)
        for cell in self._fast:
            cell[0] *= keep
            cell[1] *= keep

    def add(self, i: int, success: float) -> None:
        """Count one trial at 0-based position i; `success` in 0..1."""
        while len(self._fast) <= i:
            self._fast.append([0.0, 0.0])
            self._slow.append([0.0, 0.0])
        fast, slow = self._fast[i], self._slow[i]
        fast[0] += success
        fast[1] += 1.0
        slow[0] = slow[0] * _SLOW_KEEP + success
        slow[1] = slow[1] * _SLOW_KEEP + 1.0

    def estimates(self, n: int, z: float = 0.0) -> tuple[list[float], list[float]]:
        """Rates at positions 0..n-1, and rates that are optimistic by `z` standard deviations."""
        likely: list[float] = []
        hopeful: list[float] = []
        lasting = rate = before = 0.0  # of the position before: slow, fast, prior
        for i in range(n):
            prior = self._prior[min(i, len(self._prior) - 1)]
            fast = self._fast[i] if i < len(self._fast) else _NONE
            slow = self._slow[i] if i < len(self._slow) else _NONE
            base, shift = prior, 0.0
            if i and self._alike:
                base = min(1.0, lasting * (prior / before if before > 0 else 1.0))
                shift = _BORROWED * (logit(rate, _EDGE) - logit(lasting, _EDGE))
            lasting = (slow[0] + _SLOW_PRIOR * base) / (slow[1] + _SLOW_PRIOR)
            expected = sigmoid(logit(lasting, _EDGE) + shift)
            weight = fast[1] + _FAST_PRIOR
            rate = (fast[0] + _FAST_PRIOR * expected) / weight
            likely.append(rate)
            spread = math.sqrt((rate * (1 - rate) + 0.5 / weight) / weight)
            hopeful.append(min(1.0, rate + z * spread))
            before = prior
        return likely, hopeful


_SLOW_KEEP = 0.5 ** (1 / _SLOW_HALF_LIFE)
_NONE = (0.0, 0.0)


class SourceHistory:
    """What one source ("lookup", "dspark") drafted and how it fared.

    Args:
        acceptance: Assumed rates by position.
    """

    def __init__(self, acceptance: Sequence[float]) -> None:
        # each one given that the positions before were: accepted, accepted, drafted
        self.accepted = Frequency(acceptance)
        self.offered = Frequency((1.0,), half_life=_RARE_HALF_LIFE, alike=False)
        self.sent = Frequency((1.0,), half_life=_RARE_HALF_LIFE, alike=False)
        self._short = False  # a draft has come out shorter than asked for

    def age(self, rounds: float = 1.0) -> None:
        """Let the recent past fade."""
        self.accepted.age(rounds)
        if self._short:
            self.offered.age(rounds)
            self.sent.age(rounds)

    def add(
        self,
        cap: int,
        n_drafted: int,
        n_accepted: int,
        confidence: Sequence[float] | None = None,
    ) -> None:
        """Count a round that asked for `cap` drafts.

        Args:
            cap: Drafts asked for.
            n_drafted: Drafts that came.
            n_accepted: Drafts that the accept rule took.
            confidence: Calibrated probability of acceptance per draft. It replaces half of each
                outcome: on average it says the same, with less chance in it.
        """
        for i in range(min(n_drafted, n_accepted + 1)):
            outcome = float(i < n_accepted)
            if confidence is not None:
                outcome = 0.5 * (outcome + confidence[i])
            self.accepted.add(i, outcome)
        self._short = self._short or n_drafted < cap
        if self._short:
            for i in range(min(cap, n_drafted + 1)):
                self.sent.add(i, float(i < n_drafted))
            for i in range(min(cap, n_accepted + 1)):
                self.offered.add(i, float(i < n_drafted))

    def outlook(self, cap: int, z: float) -> "Outlook":
        """Expectations for caps 0..cap, likely and hopeful."""
        accepted, hopeful = self.accepted.estimates(cap, z)
        offered = offered_hopeful = sent = [1.0] * cap
        if self._short:
            offered, offered_hopeful = self.offered.estimates(cap, z)
            sent, _ = self.sent.estimates(cap)
        return Outlook(
            rates=[a * b for a, b in zip(accepted, offered, strict=True)],
            hopes=[a * b for a, b in zip(hopeful, offered_hopeful, strict=True)],
            sent=sent,
        )


class Outlook:
    """Expectations of one source, by 0-based position.

    Attributes:
        rates: Chance that the draft is made and accepted, given that the ones before it were.
        hopes: The same, optimistic.
        sent: Chance that it is made, given that the ones before it were made.
    """

    __slots__ = ("hopes", "rates", "sent")

    def __init__(self, rates: list[float], hopes: list[float], sent: list[float]) -> None:
        self.rates = rates
        self.hopes = hopes
        self.sent = sent

    def tokens(self, hopeful_from: int | None = None) -> list[float]:
        """Expected committed tokens of a round for caps 0..K.

        Args:
            hopeful_from: Position from which on to be optimistic; nowhere without.
        """
        totals = [1.0]
        reach = 1.0
        rates = self.rates
        if hopeful_from is not None:
            rates = [*rates[:hopeful_from], *self.hopes[hopeful_from:]]
        for rate in rates:
            reach *= rate
            totals.append(totals[-1] + reach)
        return totals
