"""Expected tokens per second by cap, from cost curves and acceptance rates; pure functions.

    tokens of a round = 1 + a1 + a1 a2 + ... + a1 ... ak

where a_i is the rate at which draft i is accepted given that the drafts before it were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spec_calibrate.curves import Curves

TYPICAL_ACCEPTANCE = 0.7
"""Rate assumed at every position of a drafter nothing is known about. Heads trained for their
target lie between 0.55 and 0.85, about level in the position."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cap that pays best.

    Attributes:
        cap: 0 where no draft pays.
        speedup: Expected tokens per second over plain decoding; 1.0 for cap 0.
    """

    cap: int
    speedup: float


def expected_tokens(acceptance: Sequence[float], cap: int) -> float:
    """Expected committed tokens of a round with `cap` drafts.

    Args:
        acceptance: Rates by position, each given the positions before; the last one holds for all
            further positions, and TYPICAL_ACCEPTANCE without any.
        cap: At least 0.
    """
    total = reach = 1.0
    for i in range(cap):
        reach *= rate_at(acceptance, i)
        total += reach
    return total


def rate_at(acceptance: Sequence[float], i: int) -> float:
    """Rate at 0-based position i; see `expected_tokens` for positions beyond the last."""
    if not acceptance:
        return TYPICAL_ACCEPTANCE
    return acceptance[min(i, len(acceptance) - 1)]


def speedups(
    curves: Curves,
    *,
    max_draft: int | None = None,
    acceptance: Sequence[float] | None = None,
    depth: int = 0,
    source: str | None = None,
) -> list[float]:
    """Expected tokens per second over plain decoding, for caps 0..max_draft.

    Args:
        curves: Measured costs.
        max_draft: Largest cap; the curves' without.
        acceptance: Rates by position; those seen while calibrating without.
        depth: Context depth in tokens.
        source: Whose draft cost to count; the dearest one's without.
    """
    most = curves.max_draft if max_draft is None else max_draft
    rates = curves.acceptance if acceptance is None else acceptance
    who = curves.source if source is None else source
    plain_s, block = curves.plain_s(depth), curves.blocks.get(who, most)
    given = [min(cap, block) for cap in range(most + 1)]
    return [expected_tokens(rates, n) * plain_s / curves.round_s(n, depth, who) for n in given]


def best_cap(
    curves: Curves,
    *,
    max_draft: int | None = None,
    acceptance: Sequence[float] | None = None,
    depth: int = 0,
    source: str | None = None,
) -> Choice:
    """The cap with the largest of `speedups`; the smaller one where two are equal.

    Where the whole block of a source pays best and another source can go further, nothing is gained
    by stopping it: the cap is then the largest.
    """
    gains = speedups(curves, max_draft=max_draft, acceptance=acceptance, depth=depth, source=source)
    cap = max(range(len(gains)), key=lambda k: (gains[k], -k))
    who = curves.source if source is None else source
    if 0 < cap == curves.blocks.get(who):
        cap = len(gains) - 1
    return Choice(cap, gains[cap])
