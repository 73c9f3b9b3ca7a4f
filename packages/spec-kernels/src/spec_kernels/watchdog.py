"""Turns the kernels of a process off when a verify stalls. Knows durations only."""

import statistics
from collections import deque

FACTOR = 10.0
WINDOW = 64
WARMUP = 8
FLOOR_SECONDS = 0.25


class Watchdog:
    """Compares each verify with the running median of those before it.

    Args:
        factor: how many medians a verify may take.
        floor_seconds: shorter verifies never count as a stall.
    """

    def __init__(self, factor: float = FACTOR, floor_seconds: float = FLOOR_SECONDS) -> None:
        self._factor, self._floor = factor, floor_seconds
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> str | None:
        """Note one verify.

        Args:
            seconds: how long it took, until its result was on the host.

        Returns:
            None, or why the kernels should be turned off.
        """
        stalled = None
        if len(self._recent) >= WARMUP:
            median = statistics.median(self._recent)
            if seconds > max(self._floor, self._factor * median):
                stalled = (
                    f"a verify took {seconds:.2f} s, {seconds / median:.0f} times the median "
                    f"of {median * 1e3:.1f} ms"
                )
        self._recent.append(seconds)
        return stalled
