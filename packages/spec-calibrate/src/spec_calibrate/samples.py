"""Repeated times of the same things, and which things are worth timing. Knows no clock."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spec_calibrate.curves import Curve, smooth

UNKNOWN_NOISE = 0.5
"""Stands for a spread that too few passes cannot tell: as bad as measurements that disagree."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated times of the same things.

    Attributes:
        seconds: By place (width or cap), the times of each pass.
    """

    seconds: dict[int, list[float]]

    @property
    def places(self) -> list[int]:
        """What was timed, ascending."""
        return sorted(self.seconds)

    @property
    def medians(self) -> list[float]:
        """Median by place, ascending."""
        return [statistics.median(self.seconds[x]) for x in self.places]

    @property
    def spreads(self) -> list[float]:
        """Median absolute deviation by place, ascending."""
        return [
            statistics.median(abs(s - statistics.median(times)) for s in times)
            for _, times in sorted(self.seconds.items())
        ]

    @property
    def noise(self) -> float:
        """Typical spread, as a share of the time; UNKNOWN_NOISE from fewer than three passes."""
        if min(len(times) for times in self.seconds.values()) < 3:
            return UNKNOWN_NOISE
        pairs = zip(self.medians, self.spreads, strict=True)
        return statistics.median(spread / m if m > 0 else 0.0 for m, spread in pairs)

    def curve(self) -> Curve:
        """The medians, smoothed where they fall within their spread."""
        places = tuple(self.places)
        n = len(self.seconds[places[0]])
        error = [2.0 * spread / n**0.5 for spread in self.spreads]  # of a median, roughly
        return Curve(places, smooth(self.medians, error))


def widths_to_measure(most: int) -> tuple[int, ...]:
    """Widths 1..most: each up to 9, then those around the edges of kernels."""
    return tuple(w for w in range(1, most + 1) if w <= 9 or w % 8 <= 1 or w % 4 == 0 or w == most)


def doubling(places: Sequence[int]) -> list[int]:
    """The first place, then each that is at least twice the one before, and the last one."""
    chosen = [places[0]]
    for place in places:
        if place >= 2 * chosen[-1]:
            chosen.append(place)
    return sorted({*chosen, places[-1]})
