"""Rows that share a target's forward: they join, decode round by round, and leave.

A round drafts row by row (together where drafters can, see `asking`), verifies all rows in one
forward and accepts row by row. While nobody drafts, rounds are pipelined as in the loop: the next
step is enqueued before the tokens of the one before are read. What a row emits is what it would
emit alone. Knows nothing about prompts.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from spec_core.ahead import Ahead
from spec_core.asking import drafts_of, observed_together
from spec_core.host import host_ints
from spec_core.loop import Run
from spec_core.protocols import Bounded, Crowd, Observation
from spec_core.step import NO_DRAFTS, Outcome
from spec_core.together import Verdict, blocks_of, decide_rows
from spec_core.types import Draft, Round, RoundKind


@dataclass(slots=True)
class RowCache:
    """Stands in for a row's cache while the row is part of a batch."""

    offset: int
    nbytes: int = 0
    is_open: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """One request of a batch.

    Attributes:
        run: Its loop state.
        on_prefill: Called with (row, ids done, ids in all) after each chunk.
        tag: Whatever the owner wants to find again.
    """

    run: Run
    on_prefill: Callable[["Row", int, int], None] | None = None
    tag: Any = None
    prefilling: Iterator[Round | None] | None = None
    solo: Iterator[Round] | None = None
    shared: RowCache | None = None  # what it shows for a cache while it is part of a batch
    lost: bool = False  # its cache went down with a forward
    ended: bool = False  # finished or failed

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        text = self.run.request.text
        return text.stopped_by if text is not None else None


Outcomes = list[tuple[Row, Round | Exception]]


@dataclass(slots=True)
class _Flight:
    """A round that has been enqueued and not read."""

    rows: list[Row | None]  # None once a row has left
    drafts: list[Draft | Exception]
    caps: list[int]
    allowed: int | None  # what the crowd said
    verdict: Verdict
    before: list[tuple[Any, Any]]
    behind: bool = False  # enqueued before the one ahead of it was read
    committed: bool = False

    @property
    def plain(self) -> bool:
        """Nobody asked for drafts."""
        return not any(self.caps)

    def next_tokens(self) -> mx.array:
        """What follows in the rows that are still there; not read."""
        tokens = self.verdict.next_tokens
        here = [at for at, row in enumerate(self.rows) if row is not None]
        return tokens if len(here) == len(self.rows) else tokens[mx.array(here, mx.int32)]


_Chosen = list[tuple[int, Row, Outcome | Exception]]  # each row's place, and what it emits


@dataclass(slots=True)
class _Mark:
    """When the latest round ended, and what it was."""

    rows: tuple[int, ...]
    plain: bool
    ahead: bool | None  # wholly enqueued ahead, wholly not, or between the two
    at: float


class Shared:
    """The rows of a batch that share forwards.

    Args:
        target: A `BatchTarget`.
        crowd: How much rows may draft; as much as alone, without.
    """

    def __init__(self, target: Any, crowd: Crowd | None) -> None:
        self._target = target
        self._crowd = crowd
        self._asked: tuple[int, int] | None = None  # (width, cap) of the round that comes next
        self.rows: list[Row] = []  # in the cache's row order
        self._cache: Any = None
        self._flight: _Flight | None = None
        self._mark: _Mark | None = None
        self._ahead = Ahead()

    @property
    def in_flight(self) -> bool:
        """True when a step has been enqueued whose tokens have not been read."""
        return self._flight is not None

    def disturb(self) -> None:
        """Something else took time: the round in progress says nothing about costs."""
        self._mark = None

    # -- coming and going ------------------------------------------------------------------------

    def join(self, rows: list[Row]) -> None:
        """Take rows in from their own caches; nothing is in flight."""
        if not rows:
            return
        assert self._flight is None
        parts = ([] if self._cache is None else [self._cache]) + [row.run.cache for row in rows]
        self._cache = self._target.join(parts)
        for row in rows:
            row.solo = None
            row.run.cache = row.shared = RowCache(row.run.cache.offset)
            self.rows.append(row)

    def leave(self, row: Row, *, keep: bool = True) -> Any:
        """Let a row go.

        Returns:
            Its own cache; None where it is not to be kept, or a step ahead cannot be taken back.
        """
        at, flight = self.rows.index(row), self._flight
        ahead = False
        if flight is not None and row in flight.rows:
            ahead = flight.committed
            self._close(flight, [row])
        single = self._target.extract(self._cache, at) if keep and not ahead else None
        rest = [i for i in range(len(self.rows)) if i != at]
        self._cache = self._target.select(self._cache, rest) if rest else None
        self.rows.remove(row)
        if not self.rows:
            self._flight = None
        row.run.cache = single
        row.shared = None
        return single

    def part(self) -> list[Row]:
        """Give all rows their own caches back; nothing is in flight."""
        assert self._flight is None
        rows = list(self.rows)
        for row in rows:
            self.leave(row)
        return rows

    # -- a round ---------------------------------------------------------------------------------

    def round(self, follow: bool) -> Outcomes | None:
        """One round of all rows.

        Args:
            follow: Whether a plain step may be enqueued behind this one.

        Returns:
            What came of it. None when the forward failed: nothing has changed, and the rows should
            go on by themselves, so that only those with a fault fail.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            flight = self._take_off(None)
        if flight is None:
            return None
        following = None
        if follow and self._goes_on(flight):
            self._close(flight, [])
            following = self._take_off(flight)
        try:
            values = host_ints(flight.verdict.packed.reshape(-1))  # sync: the one read of the round
        except Exception as error:
            return self._fall(flight, error)
        outcomes = self._settle(flight, flight.verdict.by_row(values))
        ended = [row for row, o in outcomes if isinstance(o, Exception) or o.finish_reason]
        if following is not None and ended:
            self._close(following, ended)
        self._flight = following
        self._tell(flight, following is not None, outcomes)
        return outcomes

    def _goes_on(self, flight: _Flight) -> bool:
        """Whether a plain step follows whatever this one's tokens are."""
        runs = [row.run for row in self.rows]
        return (
            flight.plain
            and all(run.may_pipeline for run in runs)
            and any(run.n_left > 1 for run in runs)
            and self._ahead.pays(len(runs))
            and not any(self._wish(row) for row in self.rows)
        )

    def _take_off(self, ahead: _Flight | None) -> _Flight | None:
        """Enqueue a round: behind a step that has not been read, or behind what is known.

        Returns:
            None when the forward failed; keys and caches are then as they were.
        """
        rows = self.rows
        if ahead is None:
            for row in rows:
                row.run.since = time.perf_counter()
        before = [(row.run.seen, _keys_of(row.run)) for row in rows]
        caps = [0 if ahead else self._cap(row) for row in rows]
        drafts = drafts_of([row.run for row in rows], caps)
        allowed, self._asked = self._allowed(), None
        for row in rows:
            row.run.asked = None
        good = [d if isinstance(d, Draft) else NO_DRAFTS for d in drafts]
        runs = [row.run for row in rows]
        try:
            known = mx.array([run.anchor for run in runs], mx.int32)
            anchors = known if ahead is None else ahead.next_tokens()  # (B,)
            blocks = blocks_of(anchors, good)  # (B, T)
            taps = sorted({layer for run in runs for layer in run.taps})
            # MLX does not check bounds; the accept rule refuses what is clipped here.
            sound = mx.clip(blocks, 0, self._target.vocab_size - 1)
            output = self._target.verify_rows(sound, self._cache, taps=taps)
            verdict = decide_rows(runs, blocks, good, output, taps)
            mx.async_eval(verdict.packed)
        except Exception:  # one row's fault, or too little memory: the caller finds out
            self._restore(before)
            return None
        return _Flight(list(rows), drafts, caps, allowed, verdict, before, ahead is not None)

    def _settle(self, flight: _Flight, values: list[list[int]]) -> Outcomes:
        """Cut each row at its stop, commit all, then hand out rounds."""
        chosen: _Chosen = []
        for at, row in enumerate(flight.rows):
            if row is not None:
                chosen.append((at, row, _chosen(row, flight, at, values[at])))
        if not flight.committed:
            kept = [0 if isinstance(c, Exception) else len(c.tokens) for _, _, c in chosen]
            self._target.commit_rows(self._cache, kept)
            flight.committed = True
        unseen = _unseen(flight, chosen)
        outcomes: Outcomes = []
        for at, row, choice in chosen:
            if isinstance(choice, Exception):
                outcomes.append((row, choice))
                continue
            if row.shared is not None:
                row.shared.offset += len(choice.tokens)
            step = flight.verdict.steps[at]
            kind: RoundKind = "verify" if step.draft.n_drafted else "plain"
            try:
                cap, kept = flight.caps[at], unseen.get(at)
                outcomes.append((row, row.run.record(step, choice, kind, cap, kept)))
            except Exception as error:
                outcomes.append((row, error))
        return outcomes

    def _close(self, flight: _Flight, leaving: list[Row]) -> None:
        """Commit a plain step that may not have been read, without the rows that leave."""
        if not flight.committed:
            self._target.commit_rows(self._cache, [int(r not in leaving) for r in self.rows])
            flight.committed = True
        flight.rows = [None if row in leaving else row for row in flight.rows]

    def _restore(self, before: list[tuple[Any, Any]]) -> None:
        """Undo what a round that failed has changed."""
        if self._cache.is_open:
            self._target.commit_rows(self._cache, [0] * len(self.rows))
        for row, (seen, keys) in zip(self.rows, before, strict=True):
            row.run.seen = seen
            if keys is not None:
                row.run.keys.setstate(keys)

    def _fall(self, flight: _Flight, error: Exception) -> Outcomes | None:
        """The device failed. What was not committed is undone; else the caches are lost."""
        self.disturb()
        if not flight.committed:
            self._restore(flight.before)
            return None
        rows, self.rows, self._cache = self.rows, [], None
        for row in rows:
            row.lost, row.shared = True, None
        return [(row, error) for row in rows]

    # -- how much to draft -----------------------------------------------------------------------

    def _allowed(self) -> int | None:
        """What the crowd says about the round that comes next; asked once."""
        if self._crowd is None:
            return None
        width = len(self.rows)
        if self._asked is None or self._asked[0] != width:
            self._asked = (width, max(self._crowd.cap(width), 0))
        return self._asked[1]

    def _wish(self, row: Row) -> int:
        """Drafts that a row may ask for in the round that comes next.

        A row that samples with a seed drafts as it does alone, since its draws depend on it.
        """
        run, sampling = row.run, row.run.request.sampling
        if run.drafter is None:
            return 0
        allowed = self._allowed()
        if allowed is None or (sampling.seed is not None and not sampling.greedy):
            return min(run.ask_cap(), run.max_draft)
        if allowed == 0:
            return 0
        own = run.cap.most if isinstance(run.cap, Bounded) else run.ask_cap()
        return min(own, run.max_draft, allowed)

    def _cap(self, row: Row) -> int:
        """The cap of the round that begins now."""
        return max(min(self._wish(row), row.run.n_left - 1), 0)

    def _tell(self, flight: _Flight, followed: bool, outcomes: Outcomes) -> None:
        """Learn from a round that nothing disturbed, and let the crowd do so."""
        ids = tuple(id(row) for row in flight.rows)
        ahead = followed if followed == flight.behind else None
        last, self._mark = self._mark, _Mark(ids, flight.plain, ahead, time.perf_counter())
        if last is None or last.rows != ids:
            return
        if flight.plain and last.plain:
            way = ahead if ahead == last.ahead else None
            self._ahead.observe(len(ids), way, self._mark.at - last.at)
        if self._crowd is None or flight.allowed is None:
            return
        if flight.plain and (not last.plain or ahead is None):  # it filled or emptied the pipeline
            return
        rounds = [one for _, one in outcomes if isinstance(one, Round)]
        self._crowd.observe(len(ids), flight.allowed, rounds, self._mark.at - last.at)


def _keys_of(run: Run) -> Any:
    """What restores a row's randomness; greedy rows have no use for it."""
    return None if run.request.sampling.greedy else run.keys.getstate()


def _unseen(flight: _Flight, chosen: _Chosen) -> dict[int, Observation]:
    """What drafters are to be shown row by row, once greedy ones of one kin have seen theirs.

    Only those that were asked for drafts: what others are shown may wait.
    """
    kept: dict[int, Observation] = {}
    greedy: dict[int, Observation] = {}
    for at, row, choice in chosen:
        if isinstance(choice, Outcome):
            own = row.run.kept(flight.verdict.steps[at], choice)
            if own is not None:
                kept[at] = own
                if row.run.request.sampling.greedy and flight.caps[at]:
                    greedy[at] = own
    seen = observed_together(greedy)
    return {at: own for at, own in kept.items() if at not in seen}


def _chosen(row: Row, flight: _Flight, at: int, values: list[int]) -> Outcome | Exception:
    draft = flight.drafts[at]
    if isinstance(draft, Exception):
        return draft
    try:
        return row.run.choose(flight.verdict.steps[at], values)
    except Exception as error:
        return error
