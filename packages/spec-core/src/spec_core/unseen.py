"""Rows that a drafter has not been shown: those of plain steps that nobody asked it about.

While nothing is drafted a drafter need not follow; shown many rows at once, it needs little more
time than for one. Knows nothing about rounds.
"""

from collections.abc import Sequence

import mlx.core as mx

from spec_core.protocols import Observation
from spec_core.types import TargetOutput

MOST = 64  # rows that are held back: they keep their taps on the device


class Unseen:
    """Rows in order, to be shown as one observation."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._taps: list[Sequence[mx.array]] = []
        self._latest: Observation | None = None

    def add(self, kept: Observation, *, wait: bool) -> None:
        """Let the drafter observe, now or later.

        Args:
            kept: What comes next.
            wait: Whether it can wait until `show` or `take`. Of its logits only the last row stays,
                as after a prompt's chunk.
        """
        if not wait:
            self.show()
            kept.alone()
            return
        self._tokens += kept.tokens
        self._taps.append(kept.output.taps)
        logits = kept.output.logits[-1:]
        self._latest = Observation(kept.drafter, (), TargetOutput(logits, ()))
        if len(self._tokens) >= MOST:
            self.show()

    def show(self) -> None:
        """Let the drafter observe what waits."""
        waiting = self.take()
        if waiting is not None:
            waiting.alone()

    def take(self) -> Observation | None:
        """What waits as one observation, for somebody else to show; None if nothing does."""
        latest, tokens, taps = self._latest, self._tokens, self._taps
        if latest is None:
            return None
        self._tokens, self._taps, self._latest = [], [], None
        together = tuple(mx.concatenate(list(parts)) for parts in zip(*taps, strict=True))
        return Observation(latest.drafter, tokens, TargetOutput(latest.output.logits, together))
