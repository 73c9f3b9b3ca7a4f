"""What a round costs on one machine, as curves; pure data with interpolation.

    seconds of a round = draft(cap) + verify(n_drafted + 1, depth) + overhead

A plain step is a curve of its own: the loop pipelines it, so it costs less than a verify of one
row. Knows nothing about models or clocks: `measure` fills the curves, `controller` uses them.
"""

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_DAY_S = 86400
_MOST_DRAFTS = 4096  # a round; what works with curves keeps lists of that length
_KNEE_SHARE = 0.1  # a bend below this share of the curve's rise is not a knee


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost at rising whole numbers, linear between them.

    Attributes:
        at: Widths, caps or depths, ascending, at least one.
        seconds: Cost at each of them, from 0 to a day.

    Raises:
        ValueError: the lengths differ, `at` does not ascend, or a cost is outside that.
    """

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.at) != len(self.seconds) or not self.at:
            raise ValueError(
                "[curves] A curve needs one cost per place and at least one, got "
                f"{len(self.at)} places and {len(self.seconds)} costs."
            )
        if any(b <= a for a, b in pairwise(self.at)):
            raise ValueError(f"[curves] A curve's places must ascend, got {self.at}.")
        if not all(0 <= s <= _DAY_S for s in self.seconds):
            raise ValueError(f"[curves] Costs must be in 0..{_DAY_S} seconds, got {self.seconds}.")

    def __call__(self, x: float) -> float:
        """Cost at x in seconds; level before the first place, the last slope after the last one."""
        at, seconds = self.at, self.seconds
        if x <= at[0] or len(at) == 1:
            return seconds[0]
        i = min(bisect_left(at, x), len(at) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1])
        if x > at[-1]:
            return seconds[-1] + max(slope, 0.0) * (x - at[-1])
        return seconds[i - 1] + slope * (x - at[i - 1])

    def to_ms(self) -> dict[str, float]:
        """Milliseconds by place, with the places as strings, for JSON."""
        return {str(x): round(s * 1e3, 6) for x, s in zip(self.at, self.seconds, strict=True)}

    @classmethod
    def from_ms(cls, value: Mapping[str, float]) -> "Curve":
        """The inverse of `to_ms`.

        Raises:
            ValueError: a place is not a whole number, or a cost is not a number.
        """
        if not isinstance(value, Mapping) or not all(
            isinstance(ms, int | float) and not isinstance(ms, bool) for ms in value.values()
        ):
            raise ValueError(f"[curves] A curve must map places to milliseconds, got {value!r}.")
        places = sorted((int(x), ms / 1e3) for x, ms in value.items())
        return cls(tuple(x for x, _ in places), tuple(s for _, s in places))


@dataclass(frozen=True, slots=True)
class Curves:
    """Costs of one pair on one machine.

    Attributes:
        verify: By context depth in tokens (ascending), the cost of a verify by width in rows.
        plain: Cost of a pipelined plain step, by context depth.
        draft: By source ("dspark", "lookup"), the drafter's cost by cap. A source without a curve
            is taken as free, as lookup nearly is.
        overhead_s: What a round costs beyond draft and verify, in seconds.
        acceptance: Acceptance rate by position given that the positions before were accepted, as
            seen while calibrating; empty when nothing was drafted.
        noise: Relative spread of repeated measurements (median absolute deviation / median).
        max_draft: Most drafts the drafter proposes a round; 0 without a drafter.
        temperatures: By position, what turns the drafter's confidence into a probability of
            acceptance (see `confidence`); empty when it states none.
        blocks: By source, the most drafts it gives a round where that is less than max_draft: in a
            hybrid, lookup may go further than the head.
    """

    verify: tuple[tuple[int, Curve], ...]
    plain: Curve
    draft: Mapping[str, Curve] = field(default_factory=dict)
    overhead_s: float = 0.0
    acceptance: tuple[float, ...] = ()
    noise: float = 0.0
    max_draft: int = 0
    temperatures: tuple[float, ...] = ()
    blocks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        depths = [depth for depth, _ in self.verify]
        if not depths or depths != sorted(set(depths)):
            raise ValueError(f"[curves] Depths must ascend and be at least one, got {depths}.")
        if min(self.plain.seconds) <= 0 or any(min(c.seconds) <= 0 for _, c in self.verify):
            raise ValueError("[curves] A plain step and a verify must take time, got 0 seconds.")
        if not (0 <= self.overhead_s < float("inf") and 0 <= self.noise < float("inf")):
            raise ValueError(
                "[curves] Overhead and noise must be finite and >= 0, got "
                f"{self.overhead_s} and {self.noise}."
            )
        if not all(0 <= a <= 1 for a in self.acceptance):
            raise ValueError(f"[curves] Acceptance rates must be in 0..1, got {self.acceptance}.")
        if not all(0 < t < float("inf") for t in self.temperatures):
            raise ValueError(f"[curves] Temperatures must be > 0, got {self.temperatures}.")
        if not all(0 <= n <= _MOST_DRAFTS for n in (self.max_draft, *self.blocks.values())):
            raise ValueError(
                f"[curves] max_draft and blocks must be in 0..{_MOST_DRAFTS}, got "
                f"{self.max_draft} and {dict(self.blocks)}."
            )

    def verify_s(self, width: int, depth: int) -> float:
        """Seconds of a verify of `width` rows on a cache of `depth` tokens.

        Linear between the measured depths and beyond the last one, but never cheaper than there.
        """
        curves = self.verify
        if depth <= curves[0][0] or len(curves) == 1:
            return curves[0][1](width)
        i = min(bisect_left(curves, depth, key=lambda pair: pair[0]), len(curves) - 1)
        (near, a), (far, b) = curves[i - 1], curves[i]
        low, high = a(width), b(width)
        share = (depth - near) / (far - near)
        if share > 1:
            return high + max(high - low, 0.0) * (share - 1)
        return low + (high - low) * share

    def plain_s(self, depth: int) -> float:
        """Seconds of a pipelined plain step on a cache of `depth` tokens."""
        return self.plain(depth)

    def draft_s(self, cap: int, source: str) -> float:
        """Seconds the drafter needs to propose `cap` drafts; 0 for a source that is free."""
        curve = self.draft.get(source)
        return curve(cap) if curve is not None else 0.0

    def round_s(self, cap: int, depth: int, source: str) -> float:
        """Seconds of a round with `cap` drafts; a pipelined plain step for cap 0."""
        if cap < 1:
            return self.plain_s(depth)
        return self.draft_s(cap, source) + self.verify_s(cap + 1, depth) + self.overhead_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data, times in milliseconds, for JSON."""
        return {
            "verify_ms_by_depth": {str(depth): curve.to_ms() for depth, curve in self.verify},
            "plain_ms_by_depth": self.plain.to_ms(),
            "draft_ms": {source: curve.to_ms() for source, curve in self.draft.items()},
            "overhead_ms": self.overhead_s * 1e3,
            "acceptance": list(self.acceptance),
            "noise": self.noise,
            "max_draft": self.max_draft,
            "temperatures": list(self.temperatures),
            "blocks": dict(self.blocks),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Curves":
        """The inverse of `to_dict`.

        Raises:
            ValueError: something is missing, of another type, or cannot be a cost.
        """
        try:
            verify = value["verify_ms_by_depth"].items()
            return cls(
                verify=tuple(
                    (int(depth), Curve.from_ms(curve))
                    for depth, curve in sorted(verify, key=lambda item: int(item[0]))
                ),
                plain=Curve.from_ms(value["plain_ms_by_depth"]),
                draft={s: Curve.from_ms(curve) for s, curve in value["draft_ms"].items()},
                overhead_s=value["overhead_ms"] / 1e3,
                acceptance=tuple(value["acceptance"]),
                noise=1.0 * value["noise"],
                max_draft=operator.index(value["max_draft"]),
                temperatures=tuple(1.0 * t for t in value["temperatures"]),
                blocks={source: operator.index(n) for source, n in value["blocks"].items()},
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"[curves] Stored curves must have the form of `Curves.to_dict`, got a fault at "
                f"{type(error).__name__}: {error}."
            ) from None

    def block(self, source: str) -> int:
        """Most drafts that a source gives a round."""
        return self.blocks.get(source, self.max_draft)

    @property
    def source(self) -> str:
        """The dearest source: what a round without luck is drafted by. Empty without a drafter."""
        return max(self.draft, key=lambda s: self.draft[s].seconds[-1], default="")


def knee(curve: Curve) -> int | None:
    """The last width before a verify gets dear: where the curve lies lowest below its chord.

    Returns:
        A measured width, or None for a curve without a bend (level, straight, or bent upwards).

    References:
        Satopaa et al. 2011, "Finding a Kneedle in a Haystack".
    """
    at, seconds = curve.at, curve.seconds
    rise = seconds[-1] - seconds[0]
    if len(at) < 3 or rise <= 0:
        return None
    slope = rise / (at[-1] - at[0])
    below = [seconds[0] + slope * (x - at[0]) - s for x, s in zip(at, seconds, strict=True)]
    i = max(range(len(at)), key=below.__getitem__)
    return at[i] if below[i] >= _KNEE_SHARE * rise else None


def smooth(values: Sequence[float], spread: Sequence[float]) -> tuple[float, ...]:
    """Make measured costs rise with the width where a fall may be noise.

    Neighbours that fall by less than their spreads together are averaged (pool adjacent violators);
    a larger fall is kept: kernels for wider blocks can be faster than those for narrow ones.

    Args:
        values: Costs by rising width.
        spread: How far each may be off, same unit and length.
    """
    pools: list[tuple[float, float, int]] = []  # mean, spread, count
    for value, off in zip(values, spread, strict=True):
        pools.append((value, off, 1))
        while len(pools) > 1:
            (a, off_a, n_a), (b, off_b, n_b) = pools[-2:]
            if not 0 < a - b <= off_a + off_b:
                break
            n = n_a + n_b
            pools[-2:] = [((a * n_a + b * n_b) / n, (off_a * n_a + off_b * n_b) / n, n)]
    return tuple(mean for mean, _, n in pools for _ in range(n))
