"""The round over several sequences: rows join and leave between rounds, each with its own accept.

A row is one request with its own settings, randomness, drafter context and stops; what it emits is
what `generate` would emit for it alone. Rows share one verify when the target can batch; the accept
rule, the settings and the bookkeeping of a row are those of the loop. A single row takes the loop's
own path, plain steps pipelined. Prompts are forwarded alone, one chunk a step, so that running rows
go on meanwhile. Knows nothing about queues, threads or texts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from spec_core.guide import Guide
from spec_core.host import host_ints
from spec_core.loop import NO_DRAFTS, Run, Step
from spec_core.pair import Pair
from spec_core.protocols import Cap
from spec_core.request import Request
from spec_core.sampling import Sampling
from spec_core.types import Draft, Round, RoundKind, TargetOutput


@runtime_checkable
class BatchTarget(Protocol):
    """What a target offers beside `Target` to verify several sequences in one forward.

    A batch cache holds one sequence per row, B of them, each with its own offset.
    """

    @property
    def batch_refusal(self) -> str | None:
        """None when sequences can share a forward, else the reason why not."""
        ...

    def join(self, caches: Sequence[Any]) -> Any:
        """One batch cache of single ones and batch caches, rows in order; the parts are consumed.

        None of them is open.
        """
        ...

    def select(self, cache: Any, rows: Sequence[int]) -> Any:
        """A batch cache of some rows; the cache is consumed. It is not open."""
        ...

    def extract(self, cache: Any, row: int) -> Any:
        """A single cache that goes on with one row; the batch cache stays usable."""
        ...

    def verify_rows(
        self, blocks: mx.array, cache: Any, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Forward one block per row, shape (B, T), and leave them open. Evaluates nothing.

        Returns:
            Logits of shape (B, T, V), taps of shape (B, T, H).
        """
        ...

    def commit_rows(self, cache: Any, n_keep: Sequence[int]) -> None:
        """Close the blocks; of row b keep the first `n_keep[b]` positions, 0..T."""
        ...


class Crowd(Protocol):
    """Decides whether rows that share a forward may draft."""

    def may_draft(self, width: int) -> bool:
        """Whether the round that begins now, of so many rows, may hold drafts."""
        ...

    def observe(self, width: int, drafted: bool, n_tokens: int, seconds: float) -> None:
        """Learn from a finished round: whether it was allowed to draft, and what it brought."""
        ...


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
    taps: tuple[int, ...] = ()
    cap: int = 0  # of the round in progress

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        text = self.run.request.text
        return text.stopped_by if text is not None else None


Outcomes = list[tuple[Row, Round | Exception]]


class Batch:
    """Rows of one target.

    Args:
        target: A `Target`; rows share forwards when it is also a `BatchTarget`.
        share: False decodes row by row even where the target can batch.
        crowd: Whether rows may draft while they share a forward; always, without. Rows that sample
            with a seed draft as they do alone, since their draws depend on it. The caps of rows
            learn only from rounds on their own.
    """

    def __init__(self, target: Any, *, share: bool = True, crowd: Crowd | None = None) -> None:
        self._target = target
        self._crowd = crowd
        self._settled: tuple[int, ...] = ()  # the rows of the round before
        self.refusal = _refusal(target) if share else "batching is switched off"
        self._waiting: list[Row] = []  # prompts not forwarded yet, first come first
        self._running: list[Row] = []  # decoding, each on its own cache
        self._joined: list[Row] = []  # decoding in `_cache`, in its row order
        self._cache: Any = None

    @property
    def rows(self) -> list[Row]:
        """Every row: prompts being forwarded, and rows that decode."""
        return [*self._joined, *self._running, *self._waiting]

    @property
    def width(self) -> int:
        """Rows that share a forward now, 1 for a lone one, 0 for none."""
        return len(self._joined) or min(len(self._running), 1)

    def add(
        self,
        pair: Pair,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        cap: Cap | None = None,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        cache: Any = None,
        prefill_chunk: int = 512,
        on_prefill: Callable[[Row, int, int], None] | None = None,
        with_logits: bool = False,
        guide: Guide | None = None,
        tag: Any = None,
    ) -> Row:
        """Queue a request; arguments as in `generate`. The pair's drafter belongs to this row.

        Raises:
            SpecError, ValueError: as `generate`.
        """
        request = Request(
            pair, prompt, max_tokens, sampling or Sampling(), stop_ids, stop_strings, prefill_chunk
        )
        run = Run(request, cap, cache, with_logits, guide)
        row = Row(run, on_prefill, tag, taps=run.taps)
        row.prefilling = run.prefill()
        self._waiting.append(row)
        return row

    def step(self) -> Outcomes:
        """One prompt chunk if a prompt waits, then a round of every row that decodes.

        Returns:
            What came of it: rounds, and for rows that failed their error. A row whose round has a
            finish reason, or that failed, still holds its cache until `remove`.
        """
        outcomes = self._prefill() if self._waiting else []
        started = {id(row) for row, _ in outcomes}
        running = [row for row in self._running if id(row) not in started]
        alone = self.refusal is not None or len(self._joined) + len(running) < 2
        for row in running:
            row.run.pipelined = alone and row.run.may_pipeline
        flying = [row for row in running if row.run.in_flight]  # lands before the row can join
        landed = [row for row in running if row not in flying]
        if alone or len(self._joined) + len(landed) < 2:
            landed += self._part()
            return outcomes + self._by_turns(flying + landed)
        outcomes += self._by_turns(flying)
        self._join(landed)
        return outcomes + self._round()

    def remove(self, row: Row) -> Any:
        """Take a row out between steps.

        Returns:
            Its single cache, closed; None when it cannot be trusted any more.
        """
        if row in self._joined:
            return self._leave(row)
        for place in (self._waiting, self._running):
            if row in place:
                place.remove(row)
        row.solo = row.prefilling = None
        try:
            row.run.close()
        except Exception:  # a cache in the middle of a failed forward
            return None
        return row.run.cache

    # -- prompts ---------------------------------------------------------------------------------

    def _prefill(self) -> Outcomes:
        """One chunk of the first prompt that waits."""
        row = self._waiting[0]
        assert row.prefilling is not None
        try:
            first = next(row.prefilling)
        except Exception as error:
            self._waiting.remove(row)
            self._running.append(row)
            return [(row, error)]
        if row.on_prefill is not None:
            row.on_prefill(row, row.run.cache.offset, len(row.run.request.prompt))
        if first is None:
            return []
        self._waiting.remove(row)
        self._running.append(row)
        row.prefilling = None
        row.run.cap.observe(first)
        return [(row, first)]

    # -- rows on their own -----------------------------------------------------------------------

    def _by_turns(self, rows: list[Row]) -> Outcomes:
        """A round of each row on its own cache."""
        return [(row, self._alone(row)) for row in rows]

    def _alone(self, row: Row) -> Round | Exception:
        if row.solo is None:
            row.solo = row.run.decode()
        try:
            return next(row.solo)
        except Exception as error:
            return error

    # -- rows that share a forward ---------------------------------------------------------------

    def _join(self, rows: list[Row]) -> None:
        """Move rows from their own caches into the batch."""
        if not rows:
            return
        parts = ([] if self._cache is None else [self._cache]) + [row.run.cache for row in rows]
        self._cache = self._target.join(parts)
        for row in rows:
            row.solo = None
            row.run.cache = row.shared = RowCache(row.run.cache.offset)
            self._running.remove(row)
            self._joined.append(row)

    def _leave(self, row: Row) -> Any:
        """Move one row out of the batch; returns its own cache."""
        at = self._joined.index(row)
        single = self._target.extract(self._cache, at)
        rest = [i for i in range(len(self._joined)) if i != at]
        self._cache = self._target.select(self._cache, rest) if rest else None
        self._joined.remove(row)
        row.run.cache = single
        row.shared = None
        return single

    def _part(self) -> list[Row]:
        """Give the rows of the batch their own caches back; returns these rows."""
        rows = list(self._joined)
        for row in rows:
            self._leave(row)
            self._running.append(row)
        return rows

    def _round(self) -> Outcomes:
        """Draft row by row, verify together, accept row by row."""
        rows = self._joined
        started = time.perf_counter()
        may_draft = self._crowd is None or self._crowd.may_draft(len(rows))
        for row in rows:
            row.run.since = started
        before = [(row.run.seen, row.run.keys.getstate()) for row in rows]
        drafts: list[Draft | Exception] = [self._draft(row, may_draft) for row in rows]
        good = [d if isinstance(d, Draft) else NO_DRAFTS for d in drafts]
        try:
            steps = self._verify(rows, good)
            packed = mx.concatenate([step.packed for step in steps])
            values = host_ints(packed)  # sync: the one read of the round, for all rows
        except Exception:  # one row's fault, or too little memory: find out row by row
            if self._cache.is_open:
                self._target.commit_rows(self._cache, [0] * len(rows))
            for row, (seen, keys) in zip(rows, before, strict=True):
                row.run.seen = seen
                row.run.keys.setstate(keys)
            return self._by_turns(self._part())
        outcomes = self._settle(rows, steps, values, drafts)
        ids = tuple(id(row) for row in rows)
        if self._crowd is not None and ids == self._settled:  # joining rows costs time of its own
            n_tokens = sum(len(r.tokens) for _, r in outcomes if isinstance(r, Round))
            seconds = time.perf_counter() - started
            self._crowd.observe(len(rows), may_draft, n_tokens, seconds)
        self._settled = ids
        return outcomes

    def _draft(self, row: Row, may_draft: bool) -> Draft | Exception:
        sampling = row.run.request.sampling
        steady = sampling.seed is not None and not sampling.greedy
        try:
            row.cap = max(row.run.take_cap(), 0) if may_draft or steady else 0
            return row.run.propose(row.cap) if row.cap else NO_DRAFTS
        except Exception as error:
            return error

    def _verify(self, rows: list[Row], drafts: list[Draft]) -> list[Step]:
        width = 1 + max(draft.n_drafted for draft in drafts)
        vocab_size = self._target.vocab_size
        blocks: list[mx.array] = []
        for row, draft in zip(rows, drafts, strict=True):
            tokens = mx.clip(draft.tokens, 0, vocab_size - 1).astype(mx.int32)
            padding = mx.zeros((width - 1 - draft.n_drafted,), mx.int32)
            anchor = mx.array([row.run.anchor], mx.int32)
            blocks.append(mx.concatenate([anchor, tokens, padding]))  # (T,)
        taps = sorted({layer for row in rows for layer in row.taps})
        output = self._target.verify_rows(mx.stack(blocks), self._cache, taps=taps)
        steps: list[Step] = []
        for at, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            n = 1 + draft.n_drafted
            seen = {layer: tap for layer, tap in zip(taps, output.taps, strict=True)}
            own = tuple(seen[layer][at, :n] for layer in row.taps)
            steps.append(row.run.decide(draft, TargetOutput(output.logits[at, :n], own)))
        return steps

    def _settle(
        self,
        rows: list[Row],
        steps: list[Step],
        values: list[int],
        drafts: list[Draft | Exception],
    ) -> Outcomes:
        """Cut each row at its stop, commit all, then hand out rounds."""
        chosen: list[Any] = []
        for row, step, draft in zip(rows, steps, drafts, strict=True):
            own, values = values[: step.packed.shape[0]], values[step.packed.shape[0] :]
            if isinstance(draft, Exception):
                chosen.append(draft)
                continue
            try:
                chosen.append(row.run.choose(step, own))
            except Exception as error:
                chosen.append(error)
        n_keep = [0 if isinstance(c, Exception) else len(c.tokens) for c in chosen]
        self._target.commit_rows(self._cache, n_keep)
        outcomes: Outcomes = []
        for row, step, choice, n in zip(rows, steps, chosen, n_keep, strict=True):
            if isinstance(choice, Exception):
                outcomes.append((row, choice))
                continue
            if row.shared is not None:
                row.shared.offset += n
            kind: RoundKind = "verify" if step.draft.n_drafted else "plain"
            try:
                outcomes.append((row, row.run.record(step, choice, kind, row.cap)))
            except Exception as error:
                outcomes.append((row, error))
        return outcomes


def _refusal(target: Any) -> str | None:
    if not isinstance(target, BatchTarget):
        return "the target verifies one sequence at a time"
    return target.batch_refusal
