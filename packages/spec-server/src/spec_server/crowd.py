"""How much to draft while several requests are decoded together, per batch width.

A wide verify of many rows costs more than one-row curves say, and so do the drafters of many rows,
in turn or together. So each width has its own costs: curves measured for it where there are any and
the drafters' time, corrected by the wall time of every round that really ran; a new width begins
with the correction of the nearest one. With the share of drafts accepted at each position, pooled
over all rows, that gives tokens per second for each cap; plain decoding, pipelined, has its own
measured rate. The best is used. What might turn out better is tried, from an allowance that is a
small share of the time spent, so drafting that never pays costs about that share. The first blocks
of a size, for which a device may compile something, are paid from another such allowance, and teach
nothing else. Knows nothing about models.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spec_calibrate import Curve
from spec_core import Round

Costs = Callable[[int], Curve | None]
"""Seconds of a verify by block width, for a number of rows; None where unknown."""

DraftCosts = Callable[[int, int], float]
"""Seconds that the drafters of a number of rows take, by cap."""

_PLAIN_FIRST = 3  # plain rounds of a width before anything is tried
_MARGIN = 1.02  # drafting must promise this much over plain decoding
_PROMISE = 1.03  # a trial must promise this much over the best
_ALLOWANCE = 0.01  # share of the time that trials may cost
_SAVED_ROUNDS = 4.0  # the allowance is saved up to the price of so many plain rounds
_SAVED_AT_FIRST = 2.0
_PLAIN_AFTER, _PLAIN_AFTER_MOST = 12, 768  # drafted rounds before plain ones are measured again
_PLAIN_TRIAL = 3
_PACE, _MOST = 0.15, 12.0  # averages follow at this pace, and count for so many rounds
_FADE_DRAFTED = 0.5 ** (1 / 50)  # of what is known about acceptance, per drafted round
_FADE_PLAIN = 0.5 ** (1 / 200)  # the same per plain round: other texts may have come
_PRIOR, _PRIOR_RATE = 4.0, 0.6  # trials that the assumed acceptance counts for
_HOPE = 1.3  # standard deviations of optimism about acceptance
_COST_HOPE = 0.08  # optimism about the cost of a block not seen yet
_RESULT_KEEP = 0.8  # of what drafted rounds have brought lately, per round
_RESULT_ROUNDS = 3  # of them before they are held against plain ones
_LUCK = 1.5  # what a row has brought counts for no more than so much of the median
_HELD, _HELD_MOST = 12, 192  # plain rounds after drafted ones that brought less
_REVIEW = 4  # rounds between two decisions
_SLOPE = 0.2  # share of a plain step that a position is taken to cost until one has been seen
_NEW = 3  # blocks of a size that a device may compile something for
_NEW_S = 0.02  # what each of them is taken to cost beside its round, until some have come
_NEW_ALLOWANCE = 0.3  # seconds for new sizes at first; then a share of the time as above
_LEAST_S, _MOST_S = 1e-9, 1e9  # what a round is taken to last, whatever a clock says
_STRAY = math.log(1.5)  # one slow round raises an average as if it were at most this far off


@dataclass(slots=True)
class _Ratio:
    """A logarithm that is averaged and forgets; one value that is far too high moves it little."""

    mean: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        off = value - self.mean if self.weight else 0.0
        if not self.weight:
            self.mean = value
        self.weight = min(self.weight + 1.0, _MOST)
        pace = max(1.0 / self.weight, _PACE)
        self.mean += pace * min(_STRAY, off)


class _Accepted:
    """How often the drafts at position 1, 2, .. are made and accepted, all before them too."""

    def __init__(self) -> None:
        self._cells: list[list[float]] = []  # per position: successes, trials

    def fade(self, share: float) -> None:
        for cell in self._cells:
            cell[0] *= share
            cell[1] *= share

    def add(self, round_: Round) -> None:
        while len(self._cells) < round_.cap:
            self._cells.append([0.0, 0.0])
        for i, cell in enumerate(self._cells):
            if i < round_.cap:
                cell[0] += i < round_.n_accepted
                cell[1] += 1.0

    def tokens(self, most: int, hope: float = 0.0) -> list[float]:
        """Expected tokens of a row's round for caps 0..most."""
        totals, before = [1.0], 1.0
        for i in range(most):
            cell = self._cells[i] if i < len(self._cells) else (0.0, 0.0)
            weight = cell[1] + _PRIOR
            share = (cell[0] + _PRIOR * _PRIOR_RATE * before) / weight
            if hope:
                share += hope * math.sqrt(max(share * (1 - share), 0.02) / weight)
            before = min(share, before)
            totals.append(totals[-1] + before)
        return totals


@dataclass(slots=True)
class _Width:
    """What is known about one number of rows."""

    curve: Curve | None
    draft_s: Callable[[int], float]  # of all rows, by cap
    plain: _Ratio = field(default_factory=_Ratio)  # logarithm of seconds per token and row
    drift: _Ratio = field(default_factory=_Ratio)  # seen over predicted, whatever the block
    blocks: dict[int, _Ratio] = field(default_factory=dict)  # the same by widest block asked for
    n_plain: int = 0
    saved_s: float = 0.0
    since_plain: int = 0
    since_review: int = 0
    plain_after: int = _PLAIN_AFTER
    plain_trial: int = 0
    result_s: float = 0.0  # what drafted rounds took lately, and the tokens they brought each row
    result_tokens: list[float] = field(default_factory=list)
    n_results: int = 0
    held: int = 0  # plain rounds that follow whatever is expected
    hold: int = _HELD
    best: int = 0
    token_s: float = 0.0  # per row, of the best way

    def plain_s(self) -> float:
        """Seconds per token and row of plain decoding."""
        return math.exp(self.plain.mean)

    def block_s(self, width: int, hope: float = 0.0) -> float:
        """Seconds of a round that asks for blocks of `width` positions; some come out shorter."""
        base = self._base_s(width)
        mean = self.drift.mean if self.curve is not None else self._without_curve(width)
        own, seen = self.blocks.get(width), 0.0
        if own is not None:
            seen = own.weight
            mean += (own.mean - mean) * seen / (seen + 1.0)
        return base * math.exp(mean - hope / (1.0 + seen))

    def learn_block(self, width: int, seconds: float) -> None:
        """A drafted round ran."""
        ratio = math.log(seconds / self._base_s(width))
        if width not in self.blocks:
            expected = self.curve is not None
            self.blocks[width] = _Ratio(self.drift.mean, 1.0) if expected else _Ratio()
        self.blocks[width].add(ratio)
        self.drift.add(ratio)

    def judge(self, seconds: float, rounds: Sequence[Round]) -> None:
        """Hold what drafted rounds have really brought against plain ones.

        What the luckier rows bring counts little more than the median: a text that is being copied
        gains much by every round, at the expense of those beside it, and soon ends.

        Args:
            seconds: Of one more drafted round.
            rounds: What it brought each row.
        """
        before = self.result_tokens or [0.0] * len(rounds)
        tokens = [
            _RESULT_KEEP * n + len(round_.tokens) for n, round_ in zip(before, rounds, strict=False)
        ]
        self.result_s = _RESULT_KEEP * self.result_s + seconds
        self.result_tokens = tokens
        self.n_results += 1
        if self.n_results < _RESULT_ROUNDS:
            return
        most = _LUCK * sorted(tokens)[(len(tokens) - 1) // 2]
        brought = sum(min(n, most) for n in tokens) / len(tokens)
        if self.result_s > brought * self.plain_s():
            self.held, self.hold = self.hold, min(2 * self.hold, _HELD_MOST)
            self.result_s, self.result_tokens, self.n_results = 0.0, [], 0
        elif self.n_results >= 4 * _RESULT_ROUNDS:
            self.hold = _HELD

    def _base_s(self, width: int) -> float:
        """What a round was expected to take."""
        if self.curve is None:
            return self.plain_s()
        return max(self.curve(width) + self.draft_s(width - 1), _LEAST_S)

    def _without_curve(self, width: int) -> float:
        """What blocks cost against a plain step, from the nearest one seen: each position alike."""
        near = min(self.blocks, key=lambda w: abs(w - width), default=None)
        if near is None:
            return math.log1p(_SLOPE * (width - 1))
        slope = max(0.0, math.expm1(self.blocks[near].mean)) / (near - 1)
        return math.log1p(slope * (width - 1))


def _kind(width: int, cap: int) -> tuple[int, int]:
    """Blocks of about a size, which a device compiles for alike: both as powers of two."""
    return (width - 1).bit_length(), cap.bit_length()


class CrowdCap:
    """Decides, round by round, how many drafts rows that share a forward may hold.

    Args:
        most: Largest cap.
        costs: Measured costs by batch width; rounds alone teach without.
        draft_s: What the rows' drafters take; as if they took nothing, without.
    """

    def __init__(
        self, most: int = 8, costs: Costs | None = None, draft_s: DraftCosts | None = None
    ) -> None:
        self._most = most
        self._costs = costs
        self._draft_s = draft_s or (lambda rows, cap: 0.0)
        self._widths: dict[int, _Width] = {}
        self._accepted = _Accepted()
        self._met: Counter[tuple[int, int]] = Counter()  # blocks by rows and size
        self._new_s, self._n_new, self._saved_for_new_s = _NEW_S, 0, _NEW_ALLOWANCE

    def cap(self, width: int) -> int:
        """Most drafts of each row in the round that begins now; 0 parks."""
        if self._most < 1:
            return 0
        known = self._known(width)
        if known.n_plain < _PLAIN_FIRST or known.plain_trial:
            return 0
        if known.held:
            known.held -= 1
            return 0
        known.since_review += 1
        if not known.token_s or known.since_review >= _REVIEW:
            known.since_review = 0
            return self._meet(width, self._decide(known, width))
        return self._meet(width, known.best)

    def observe(self, width: int, cap: int, rounds: Sequence[Round], seconds: float) -> None:
        """Learn from a finished round of all rows."""
        n_tokens = sum(len(round_.tokens) for round_ in rounds)
        if seconds <= 0 or not n_tokens:
            return
        seconds = min(max(seconds, _LEAST_S), _MOST_S)
        known = self._known(width)
        saved = self._saved_for_new_s + _ALLOWANCE * seconds
        self._saved_for_new_s = min(saved, max(_NEW_ALLOWANCE, _NEW * self._new_s))
        if cap and known.curve is not None and self._met[_kind(width, cap)] <= _NEW:
            self._learn_new(seconds - known.block_s(1 + cap))
            return
        saved_s = known.saved_s + _ALLOWANCE * seconds
        if cap != known.best and known.token_s:  # a trial: what it lost is paid for
            saved_s += min(0.0, n_tokens / width * known.token_s - seconds)
        if cap == 0:
            known.plain.add(math.log(seconds * width / n_tokens))
            known.n_plain += 1
            known.since_plain = 0
            known.plain_trial = max(0, known.plain_trial - 1)
            self._accepted.fade(_FADE_PLAIN)
            if known.n_plain == _PLAIN_FIRST:
                saved_s = _SAVED_AT_FIRST * known.plain_s()
        else:
            known.learn_block(1 + cap, seconds)
            known.judge(seconds, rounds)
            known.since_plain += 1
            self._accepted.fade(_FADE_DRAFTED)
            for round_ in rounds:
                self._accepted.add(round_)
        plain_s = known.plain_s() if known.n_plain else seconds
        known.saved_s = max(-_SAVED_ROUNDS * plain_s, min(_SAVED_ROUNDS * plain_s, saved_s))

    def saw(self, round_: Round) -> None:
        """Learn about acceptance from the round of a row on its own."""
        if round_.cap > 0:
            self._accepted.fade(_FADE_DRAFTED)
            self._accepted.add(round_)

    def parked(self, width: int) -> bool:
        """True when drafting is known not to pay at this width."""
        known = self._widths.get(width)
        if known is None or known.n_plain < _PLAIN_FIRST:
            return False
        return known.best == 0 or known.held > 0

    def _known(self, width: int) -> _Width:
        known = self._widths.get(width)
        if known is None:
            curve = self._costs(width) if self._costs is not None and self._most else None
            known = _Width(curve, lambda cap: self._draft_s(width, cap))
            # Without a curve drift is against plain steps, and says nothing about another's curve.
            learnt = [n for n, k in self._widths.items() if k.curve is not None and k.blocks]
            near = min(learnt, key=lambda other: abs(other - width), default=None)
            if curve is not None:  # which counts for as much as one round
                mean = self._widths[near].drift.mean if near is not None else 0.0
                known.drift = _Ratio(mean, 1.0)
            if near is not None:  # what lost there has hardly a better chance here
                known.held, known.hold = self._widths[near].held, self._widths[near].hold
            self._widths[width] = known
        return known

    def _meet(self, width: int, cap: int) -> int:
        """Blocks of this size come: what may be new about them is paid in advance."""
        if cap:
            kind = _kind(width, cap)
            self._met[kind] += 1
            if self._met[kind] <= _NEW:
                self._saved_for_new_s -= self._new_s
        return cap

    def _learn_new(self, seconds: float) -> None:
        """What one of the first blocks of a size took longer than its round should."""
        more_s = max(seconds, 0.0) - self._new_s
        self._saved_for_new_s -= more_s
        self._n_new += 1
        self._new_s += max(1.0 / self._n_new, _PACE) * more_s

    def _affords(self, width: int, cap: int) -> bool:
        """Whether what is new about blocks of this size can be paid."""
        n_new = _NEW - self._met[_kind(width, cap)]
        return n_new <= 0 or n_new * self._new_s <= self._saved_for_new_s

    def _decide(self, known: _Width, width: int) -> int:
        likely = self._seconds(known)
        open_ = [k for k in range(len(likely)) if k == 0 or self._affords(width, k)]
        best = min(open_, key=likely.__getitem__)
        if likely[best] * _MARGIN > likely[0]:
            best = 0
        known.best, known.token_s = best, likely[best]
        if best and self._plain_is_due(known, likely[0] / likely[best]):
            return 0
        if known.saved_s <= 0:
            return best
        hopeful = self._seconds(known, hope=True)
        others = [k for k in open_ if k not in (0, best)]
        trial = min(others, key=hopeful.__getitem__, default=best)
        if trial == best or hopeful[trial] * _PROMISE > likely[best]:
            return best
        # Such a round brings some tokens; the best way needs less time for them.
        seconds = known.block_s(1 + trial)
        loss_s = seconds * (1.0 - likely[best] / likely[trial])
        return trial if loss_s <= known.saved_s else best

    def _seconds(self, known: _Width, *, hope: bool = False) -> list[float]:
        """Seconds per token and row by cap."""
        tokens = self._accepted.tokens(self._most, _HOPE if hope else 0.0)
        off = _COST_HOPE if hope else 0.0
        costs = [known.block_s(1 + k, off) / tokens[k] for k in range(1, self._most + 1)]
        return [known.plain_s(), *costs]

    def _plain_is_due(self, known: _Width, speedup: float) -> bool:
        """True when drafting should be held against plain rounds again."""
        speedup = min(speedup, 1.0 + self._most)  # more would be a stray plain round's
        if known.since_plain < known.plain_after * max(1.0, (speedup - 1.0) / 0.25):
            return False
        known.plain_trial = _PLAIN_TRIAL
        known.plain.weight = min(known.plain.weight, 1.0)  # old by now
        known.plain_after = min(2 * known.plain_after, _PLAIN_AFTER_MOST)
        return True
