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

import mlx.core as mx

from spec_core import Draft, Sampling, TargetOutput

_GRAMS = (16, 8, 5)  # indexed lengths above min_match, longest first
_DEPTH_LIMIT = 64  # a match is measured no further back than this
_COPY_RUN = 8  # from this depth on, the draft's length follows the depth
_NOTHING = mx.array([], mx.int32)  # data, so any thread may read it


class LookupDrafter:
    """N-gram lookup.

    A match of 8 tokens or more is taken for a copy run and drafted at twice its depth, so long
    copies are proposed in ever longer drafts; a shallower match gets `short_draft` tokens. When
    drafts stop being accepted the drafter parks: it proposes nothing for a while, then probes with
    a short draft, and waits longer after each probe that fails.

    Args:
        max_draft: Longest draft.
        short_draft: Draft length of a shallow match.
        min_match: Fewest newest tokens (the anchor included) that must have occurred before.

    Raises:
        ValueError: an argument is below 1, or min_match above 64: no longer match is measured.
    """

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, max_draft: int = 32, short_draft: int = 6, min_match: int = 3) -> None:
        if min(max_draft, short_draft, min_match) < 1:
            raise ValueError(
                "[lookup] max_draft, short_draft and min_match must be >= 1, got "
                f"{max_draft}, {short_draft} and {min_match}."
            )
        if min_match > _DEPTH_LIMIT:
            raise ValueError(f"[lookup] min_match must be at most {_DEPTH_LIMIT}, got {min_match}.")
        self.max_draft = max_draft
        self._settings = (max_draft, short_draft, min_match)
        self._short = min(short_draft, max_draft)
        self._lengths = (*(n for n in _GRAMS if n > min_match), min_match)
        self.reset()

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """What followed the latest occurrence of the longest indexed match; empty on a miss."""
        self._n_drafted = 0
        tokens = [*self._tail(), anchor]
        start, depth = self._match(tokens)
        self._passed_over = depth > 0 and self._parking.napping
        if depth == 0 or self._passed_over:
            return Draft(_NOTHING, source=self.name)
        length = 2 * depth if depth >= _COPY_RUN else self._short
        if self._parking.probing:
            length = min(length, self._short)
        copied = self._copy(start, anchor, min(length, cap, self.max_draft))
        self._n_drafted = len(copied)
        return Draft(mx.array(copied, mx.int32), source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Index committed tokens; what was accepted of the last draft decides about parking."""
        if self._n_drafted:
            self._parking.record((len(tokens) - 1) / self._n_drafted)
            self._n_drafted = 0
        if self._passed_over:  # counted here: a round that is repeated drafts twice
            self._parking.pass_over()
            self._passed_over = False
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n, index in zip(self._lengths, self._index, strict=True):
                if end >= n:
                    index[hash(tuple(self._tokens[end - n : end]))] = end

    def reset(self) -> None:
        """Forget the sequence."""
        self._tokens: list[int] = []
        # per gram length: hash of the gram -> index just after its latest occurrence
        self._index: tuple[dict[int, int], ...] = tuple({} for _ in self._lengths)
        self._n_drafted = 0
        self._passed_over = False  # the draft in flight fell into a nap
        self._parking = _Parking()

    def fork(self) -> "LookupDrafter":
        """Another one with the same settings and no tokens."""
        return LookupDrafter(*self._settings)

    def state(self) -> tuple[int, ...]:
        """The committed tokens; parking is not part of it."""
        return tuple(self._tokens)

    def restore(self, state: tuple[int, ...]) -> None:
        """Index the tokens of a snapshot anew."""
        self.reset()
        self.observe(state, TargetOutput(_NOTHING))

    def _tail(self) -> list[int]:
        return self._tokens[-(_DEPTH_LIMIT - 1) :]

    def _match(self, newest: list[int]) -> tuple[int, int]:
        """Where the newest tokens occurred before: (index after it, depth); depth 0 is a miss."""
        for n, index in zip(self._lengths, self._index, strict=True):
            if len(newest) < n:
                continue
            end = index.get(hash(tuple(newest[-n:])), 0)
            depth = self._depth(newest, end)
            if depth >= n:  # a hash may collide
                return end, depth
        return 0, 0

    def _depth(self, newest: list[int], end: int) -> int:
        """Number of newest tokens that equal those just before `end`."""
        limit = min(len(newest), end)
        earlier = self._tokens[end - limit : end]
        for depth in range(limit):
            if newest[-1 - depth] != earlier[-1 - depth]:
                return depth
        return limit

    def _copy(self, start: int, anchor: int, length: int) -> list[int]:
        """`length` tokens from `start` on; past the anchor the copy goes on from itself."""
        sequence = [*self._tokens[start : start + length], anchor]
        if len(sequence) > length:
            return sequence[:length]
        period = len(sequence)
        return [sequence[i % period] for i in range(length)]


class _Parking:
    """Stops drafting while drafts are rejected.

    `rate` is an average of accepted shares that forgets with a half-life of about three drafts.
    """

    _FLOOR = 0.2
    _FIRST_NAP = 8
    _LONGEST_NAP = 128

    def __init__(self) -> None:
        self._rate = 1.0
        self._nap = self._FIRST_NAP
        self._left = 0
        self.probing = False

    @property
    def napping(self) -> bool:
        """True when chances to draft are to be passed over."""
        return self._left > 0

    def pass_over(self) -> None:
        """Count a chance that was."""
        self._left -= 1

    def record(self, share: float) -> None:
        """Count a draft of which `share` was accepted."""
        if self.probing and share < 0.5:
            self._nap = min(2 * self._nap, self._LONGEST_NAP)
            self._left = self._nap
            return
        if self.probing:
            self.probing, self._rate, self._nap = False, 0.5, self._FIRST_NAP
        self._rate += 0.25 * (share - self._rate)
        if self._rate < self._FLOOR:
            self.probing, self._left = True, self._nap
