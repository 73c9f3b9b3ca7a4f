"""Whether drafting pays while several requests are decoded together: measured, per batch width.

A wide verify of many rows costs more than the one-row curves say, so nothing is predicted here:
tokens per second of whole rounds with and without drafts are averaged for each width, the better
way is used, and the other one is tried again now and then, ever more seldom while it keeps losing.
Knows nothing about models or requests.
"""

from dataclasses import dataclass, field

_LEAST = 4  # rounds of each way before the two are compared
_TRIAL = 3  # rounds of a later trial
_FIRST_WAIT, _LONGEST_WAIT = 48, 1536  # rounds between trials
_PACE = 0.2  # how fast an average follows


@dataclass(slots=True)
class _Way:
    """Tokens per second of one way to decode, as an average that forgets."""

    rate: float = 0.0
    n: int = 0

    def add(self, rate: float) -> None:
        self.n += 1
        pace = max(1.0 / self.n, _PACE)
        self.rate += pace * (rate - self.rate)


@dataclass(slots=True)
class _Width:
    """What is known about one batch width."""

    plain: _Way = field(default_factory=_Way)
    drafted: _Way = field(default_factory=_Way)
    wait: int = _FIRST_WAIT
    left: int = _FIRST_WAIT  # rounds until the next trial
    trial: int = 0  # rounds left of a trial


class CrowdCap:
    """Decides, round by round, whether rows that share a forward may draft."""

    def __init__(self) -> None:
        self._widths: dict[int, _Width] = {}

    def may_draft(self, width: int) -> bool:
        """Whether the round that begins now may hold drafts."""
        known = self._widths.setdefault(width, _Width())
        if known.drafted.n < _LEAST:
            return True
        if known.plain.n < _LEAST:
            return False
        better = known.drafted.rate > known.plain.rate
        return better != (known.trial > 0)

    def observe(self, width: int, drafted: bool, n_tokens: int, seconds: float) -> None:
        """Learn from a finished round of all rows."""
        known = self._widths.setdefault(width, _Width())
        if seconds <= 0:
            return
        was_better = known.drafted.rate > known.plain.rate
        (known.drafted if drafted else known.plain).add(n_tokens / seconds)
        if min(known.drafted.n, known.plain.n) < _LEAST:
            return
        if known.trial:
            known.trial -= 1
            if known.trial == 0:
                changed = (known.drafted.rate > known.plain.rate) != was_better
                known.wait = _FIRST_WAIT if changed else min(2 * known.wait, _LONGEST_WAIT)
                known.left = known.wait
            return
        known.left -= 1
        if known.left <= 0:
            known.trial = _TRIAL

    def parked(self, width: int) -> bool:
        """True when drafting is known not to pay at this width."""
        known = self._widths.get(width)
        if known is None or min(known.drafted.n, known.plain.n) < _LEAST:
            return False
        return known.plain.rate >= known.drafted.rate
