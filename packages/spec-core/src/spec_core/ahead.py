"""Whether it pays to enqueue a plain step before the one ahead of it has been read: measured.

Enqueueing ahead hides the host's work behind the device's. But while a step is in flight its caches
cannot be written in place: every layer's buffers are copied, which costs more the longer and the
more sequences there are. Both ways are timed in turn, the better one is used, and the other one is
tried again now and then, as contexts grow. Knows nothing about rows or caches.
"""

from dataclasses import dataclass, field

_FIRST_WAIT, _LONGEST_WAIT = 32, 512  # rounds between trials of the other way
_TRIAL = 4  # rounds of a trial; the first one, half in each way, is not counted
_PACE = 0.12  # how fast an average follows
_STRAY = 1.3  # a round moves an average as if it were at most this many times as long
_CLEARLY = 1.02  # ahead is kept unless the other way is better by this factor


@dataclass(slots=True)
class _Way:
    """Seconds of a round, as an average that forgets."""

    seconds: float = 0.0
    n: int = 0

    def add(self, seconds: float) -> None:
        if self.n:
            seconds = min(seconds, _STRAY * self.seconds)
        self.n += 1
        self.seconds += max(1.0 / self.n, _PACE) * (seconds - self.seconds)


@dataclass(slots=True)
class _Width:
    """What is known about one number of rows."""

    ahead: _Way = field(default_factory=_Way)
    alone: _Way = field(default_factory=_Way)
    wait: int = _FIRST_WAIT
    left: int = _FIRST_WAIT  # rounds until the next trial
    trial: int = 0  # rounds left of a trial
    used: bool = True  # the way in use when the trial began

    @property
    def better(self) -> bool:
        """Whether enqueueing ahead is the better way."""
        return not self.alone.n or self.ahead.seconds <= _CLEARLY * self.alone.seconds


class Ahead:
    """Decides, round by round, for each number of rows."""

    def __init__(self) -> None:
        self._widths: dict[int, _Width] = {}

    def pays(self, width: int) -> bool:
        """Whether a step may be enqueued behind the round that is in flight."""
        known = self._widths.setdefault(width, _Width())
        return not known.used if known.trial else known.better

    def observe(self, width: int, ahead: bool | None, seconds: float) -> None:
        """Learn from a plain round.

        Args:
            width: Number of rows.
            ahead: Whether it and the one before were enqueued ahead, or neither; None for a
                round between the two ways.
            seconds: Since the round before.
        """
        known = self._widths.setdefault(width, _Width())
        if ahead is not None and seconds > 0:
            (known.ahead if ahead else known.alone).add(seconds)
        if known.trial:
            known.trial -= 1
            if known.trial == 0:
                changed = known.better != known.used
                known.wait = _FIRST_WAIT if changed else min(2 * known.wait, _LONGEST_WAIT)
                known.left = known.wait
            return
        known.left -= 1
        if known.left <= 0:
            known.trial, known.used = _TRIAL, known.better
