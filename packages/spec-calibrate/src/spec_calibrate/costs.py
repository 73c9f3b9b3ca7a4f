"""Cost curves corrected by the rounds that really ran.

The machine may be hotter, busier or deeper in the context than when it was calibrated. For each
kind of round (source and width; the plain step is its own kind) the logarithm of seen over
predicted time is averaged; kinds not seen lately borrow from their neighbours in width, and from
all others together. Knows nothing about acceptance.
"""

import math

PLAIN = ("", 0)
"""The kind of a pipelined plain step."""

_FORGET = 0.5 ** (1 / 160)  # weight of evidence, per round of any kind
_MOST = 12.0  # an average over about this many rounds
_OWN_PRIOR = 1.0  # observations that the neighbourhood counts for
_PLAIN_PRIOR = 0.25  # the same for plain steps, which vary least
_NEIGHBOUR_PRIOR = 0.5  # observations that the common drift counts for
_COMMON_PRIOR = 1.0  # observations that the measured curves count for
_KERNEL = (1.0, 0.6, 0.25, 0.08)  # by distance in width
_REACH = len(_KERNEL) - 1
_HOPE = 0.06  # optimism about a width not seen lately
_CHANGE = 3  # rounds far off in a row that are believed
_STEP = 0.4  # a single round moves an average as if it were at most this far off


class _Cell:
    """Average of a kind's logarithm of seen over predicted time."""

    __slots__ = ("_strays", "mean", "weight")

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self.weight = 0.0  # recent rounds
        self._strays: list[float] = []  # rounds in a row that were far off to the same side

    def add(self, ratio: float) -> None:
        """Count a round: one far off is mistrusted, the third in a row is a change."""
        off = ratio - self.mean
        if abs(off) <= _STEP:
            self._strays.clear()
        else:
            if self._strays and (self._strays[-1] > self.mean) != (off > 0):
                self._strays.clear()
            self._strays.append(ratio)
        if len(self._strays) >= _CHANGE:
            self.mean = min(self._strays, key=lambda r: abs(r - self.mean))
            self.weight = float(_CHANGE)
            self._strays.clear()
            return
        self.weight = min(self.weight + 1.0, _MOST)
        self.mean += max(-_STEP, min(_STEP, off)) / self.weight


class LiveCosts:
    """Factors on predicted times, learnt from the rounds that ran."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Cell] = {}
        self._drift = 0.0

    @property
    def drift(self) -> float:
        """Common factor, as a logarithm, by which rounds differ from the measured curves."""
        return self._drift

    def observe(self, kind: tuple[str, int], seconds: float, predicted_s: float) -> None:
        """Learn from a round.

        Args:
            kind: (source, width), or PLAIN.
            seconds: How long it took.
            predicted_s: What the curves say, without correction.
        """
        for cell in self._seen.values():
            cell.weight *= _FORGET
        if seconds <= 0 or predicted_s <= 0:
            return
        cell = self._seen.get(kind)
        if cell is None:
            cell = self._seen[kind] = _Cell(self._drift)
        cell.add(math.log(seconds / predicted_s))
        total = sum(cell.mean * cell.weight for cell in self._seen.values())
        self._drift = total / (sum(cell.weight for cell in self._seen.values()) + _COMMON_PRIOR)

    def plain_factor(self) -> float:
        """What to multiply the prediction of a plain step with."""
        cell = self._seen.get(PLAIN)
        if cell is None:
            return math.exp(self._drift)
        trust = cell.weight / (cell.weight + _PLAIN_PRIOR)
        return math.exp(self._drift + (cell.mean - self._drift) * trust)

    def factors(self, source: str, n: int, *, hopeful: bool = False) -> list[float]:
        """What to multiply predictions with, for widths 1..n of a source.

        Args:
            source: Whose rounds.
            n: Widest block.
            hopeful: Lean towards the measured curve, and a little below, where neither the width
                nor its neighbours have been seen lately: what drifted elsewhere need not have
                drifted here.
        """
        totals = [_NEIGHBOUR_PRIOR * self._drift] * (n + 1)
        weights = [_NEIGHBOUR_PRIOR] * (n + 1)
        own: dict[int, _Cell] = {}
        for (name, width), cell in self._seen.items():
            if name != source or width == 0:
                continue
            own[width] = cell
            for other in range(max(1, width - _REACH), min(n, width + _REACH) + 1):
                if other != width:
                    share = _KERNEL[abs(other - width)] * cell.weight
                    totals[other] += share * cell.mean
                    weights[other] += share
        factors: list[float] = []
        for width in range(1, n + 1):
            mean, evidence = totals[width] / weights[width], weights[width] - _NEIGHBOUR_PRIOR
            if width in own:
                cell = own[width]
                mean += (cell.mean - mean) * cell.weight / (cell.weight + _OWN_PRIOR)
                evidence += cell.weight
            if hopeful:
                mean -= (max(mean, 0.0) + _HOPE) / (1.0 + evidence)
            factors.append(math.exp(mean))
        return factors
