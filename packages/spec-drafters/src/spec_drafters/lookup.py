"""Drafts copied from earlier in the same sequence: no weights, no taps.

The newest tokens are looked up among everything committed so far; where they occurred before, what
followed then is proposed again. An index of n-grams grows with each committed token, so a lookup
costs the same at any context length. Knows nothing about models, and keeps nothing between
sequences.

References:
    Prompt lookup: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. Draft length that
    grows with the match: Oliaro et al. 2024, arXiv:2411.04975 (SuffixDecoding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from spec_core import Draft, Sampling, TargetOutput

_DEEP = 8  # a match of this many tokens is a copy run
_NONE = Draft(mx.zeros((0,), mx.int32), source="lookup")


@dataclass(slots=True)
class _State:
    tokens: list[int] = field(default_factory=list)
    # n-gram -> index just after its latest occurrence that something follows
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_drafted: int = 0  # of the round in flight
    credit: float = 0.0
    sleep: int = 0


class LookupDrafter:
    """N-gram lookup.

    Args:
        max_draft: Longest draft, for copy runs.
        short_draft: Draft length of a match shallower than 8 tokens.
        min_match: Fewest newest tokens (the anchor included) that must have occurred before.

    Raises:
        ValueError: an argument is below 1.
    """

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, max_draft: int = 32, short_draft: int = 6, min_match: int = 3) -> None:
        if min(max_draft, short_draft, min_match) < 1:
            raise ValueError(
                "[lookup] max_draft, short_draft and min_match must be >= 1, got "
                f"{max_draft}, {short_draft} and {min_match}."
            )
        self.max_draft = max_draft
        self._short = short_draft
        self._min = min_match
        self._state = _State()
