"""The round over several sequences: rows join and leave between rounds, each with its own accept.

A row is one request with its own settings, randomness, drafter context and stops; what it emits is
what `generate` would emit for it alone. Rows share one verify when the target can batch (`shared`);
the accept rule, the settings and the bookkeeping of a row are those of the loop. A single row takes
the loop's own path. Plain steps are pipelined either way. Prompts are forwarded one by one, short
ones together where the target says that it pays, and so many tokens a step that running rows go on
meanwhile. Knows nothing about queues, threads or texts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from spec_core.errors import StateError
from spec_core.guide import Guide
from spec_core.loop import Run
from spec_core.pair import Pair
from spec_core.protocols import BatchTarget, Cap, Crowd, PromptsTogether
from spec_core.request import Request, WholePrompt
from spec_core.sampling import Sampling
from spec_core.shared import Outcomes, Row, RowCache, Shared
from spec_core.text import StopStrings
from spec_core.types import Round, TargetOutput

_PROMPTS = 512  # tokens of several prompts in one step: short ones join together

__all__ = ["Batch", "BatchTarget", "Crowd", "Outcomes", "Row", "RowCache"]


class Batch:
    """Rows of one target.

    Args:
        target: A `Target`; rows share forwards when it is also a `BatchTarget`.
        share: False decodes row by row even where the target can batch.
        crowd: How much rows may draft while they share a forward; as much as alone, without. The
            caps of rows learn only from rounds on their own.
    """

    def __init__(self, target: Any, *, share: bool = True, crowd: Crowd | None = None) -> None:
        self._target = target
        self._crowd = crowd
        self.refusal = _refusal(target) if share else "batching is switched off"
        self._waiting: list[Row] = []  # prompts not forwarded yet, first come first
        self._running: list[Row] = []  # decoding, each on its own cache
        self._shared = Shared(target, crowd)  # decoding together

    @property
    def rows(self) -> list[Row]:
        """Every row: prompts being forwarded, and rows that decode."""
        return [*self._shared.rows, *self._running, *self._waiting]

    @property
    def width(self) -> int:
        """Rows that share a forward now, 1 for a lone one, 0 for none."""
        return len(self._shared.rows) or min(len(self._running), 1)

    def add(
        self,
        pair: Pair,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        cap: Cap | None = None,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] | StopStrings = (),
        cache: Any = None,
        prefill_chunk: int = 512,
        on_prefill: Callable[[Row, int, int], None] | None = None,
        with_logits: bool = False,
        guide: Guide | None = None,
        on_prompt_logits: Callable[[int, mx.array], None] | None = None,
        tag: Any = None,
    ) -> Row:
        """Queue a request; arguments as in `generate`. The pair's drafter belongs to this row.

        `on_prompt_logits` is called with (position of the first row, logits of shape (T, V)) for
        each chunk of the prompt, which then goes through `verify`.

        Raises:
            SpecError, ValueError: as `generate`.
        """
        request = Request(
            pair, prompt, max_tokens, sampling or Sampling(), stop_ids, stop_strings, prefill_chunk
        )
        run = Run(request, cap, cache, with_logits, guide, on_prompt_logits)
        row = Row(run, on_prefill, tag)
        row.prefilling = run.prefill()
        self._waiting.append(row)
        return row

    def step(self) -> Outcomes:
        """Chunks of prompts that wait, then a round of every row that decodes.

        Returns:
            What came of it: rounds, and for rows that failed their error. A row whose round has a
            finish reason, or that failed, still holds its cache: `remove` it before the next step.

        Raises:
            StateError: a row that ended is still there.
        """
        if any(row.ended for row in self.rows):
            raise StateError("[batch] A row that ended must be removed before the next step.")
        outcomes = self._step()
        for row, outcome in outcomes:
            row.ended = isinstance(outcome, Exception) or outcome.finish_reason is not None
        return outcomes

    def _step(self) -> Outcomes:
        outcomes = self._prompts()
        started = {id(row) for row, _ in outcomes}
        running = [row for row in self._running if id(row) not in started]
        n_shared = len(self._shared.rows)
        alone = self.refusal is not None or n_shared + len(running) < 2
        for row in running:
            row.run.pipelined = alone and row.run.may_pipeline
        flying = [row for row in running if row.run.in_flight]  # lands before the row can join
        landed = [row for row in running if row not in flying]
        together = not alone and n_shared + len(landed) >= 2
        if self._shared.in_flight and (landed or not together):  # lands before anything changes
            return outcomes + self._together(False) + self._by_turns(flying)
        if not together:
            landed += self._part()
            return outcomes + self._by_turns(flying + landed)
        outcomes += self._by_turns(flying)
        self._shared.join(landed)
        for row in landed:
            self._running.remove(row)
        return outcomes + self._together(True)

    def remove(self, row: Row, *, keep: bool = True) -> Any:
        """Take a row out between steps.

        Args:
            row: One of `rows`.
            keep: Whether its state is wanted: then its drafter has observed all that the cache
                holds.

        Returns:
            Its single cache, closed; None when it cannot be trusted any more, or is not wanted.
        """
        if row.lost:
            return None
        if row in self._shared.rows:
            self._shared.leave(row, keep=keep)
        for place in (self._waiting, self._running):
            if row in place:
                place.remove(row)
        row.solo = row.prefilling = row.run.forwarded = None
        if not keep or row.run.cache is None:
            return None
        try:
            row.run.close()
        except Exception:  # a cache in the middle of a failed forward, or a drafter that failed
            return None
        return row.run.cache

    # -- prompts ---------------------------------------------------------------------------------

    def _prompts(self) -> Outcomes:
        """Chunks of the prompts that wait, in order: no more tokens than one chunk may have."""
        outcomes: Outcomes = []
        n_tokens = 0
        while self._waiting:
            row = self._waiting[0]
            start = row.run.cache.offset
            if n_tokens and n_tokens + _n_left(row.run) > _most(row.run):
                break
            if n_tokens == 0:
                self._forward_together()
            outcomes += self._prefill(row)
            n_tokens += max(row.run.cache.offset - start, 1)
        return outcomes

    def _forward_together(self) -> None:
        """Forward the short prompts whose turn comes in this step, if there are several.

        Each row takes in what is its own when its turn comes.
        """
        target = self._target
        if len(self._waiting) < 2 or self.refusal is not None:
            return
        if not isinstance(target, PromptsTogether):
            return
        runs: list[Run] = []
        longest, n_tokens = target.most_prompt_ids, 0
        for run in (row.run for row in self._waiting):
            n_tokens += _n_left(run)
            if n_tokens > _most(run):
                break
            if _is_short(run, longest):
                runs.append(run)
        if len(runs) < 2:
            return
        self._shared.disturb()
        began = time.perf_counter()
        taps = sorted({layer for run in runs for layer in run.taps})
        try:
            caches = [target.make_cache() for _ in runs]
            outputs = target.prefill_rows([r.request.prompt for r in runs], caches, taps=taps)
            parts = list(zip(runs, caches, outputs, strict=True))
            shown = [tuple(o.taps[taps.index(layer)] for layer in r.taps) for r, _, o in parts]
        except Exception:  # one row's fault, or too little memory: each goes on by itself
            return
        took_s = time.perf_counter() - began
        for (run, cache, output), own in zip(parts, shown, strict=True):
            run.forwarded = WholePrompt(cache, TargetOutput(output.logits, own), took_s)

    def _prefill(self, row: Row) -> Outcomes:
        """One chunk of a prompt."""
        assert row.prefilling is not None
        self._shared.disturb()
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
        self._shared.disturb()
        try:
            round_ = next(row.solo)
        except Exception as error:
            return error
        if self._crowd is not None:
            self._crowd.saw(round_)
        return round_

    # -- rows that share a forward ---------------------------------------------------------------

    def _together(self, follow: bool) -> Outcomes:
        """A round of the rows that share forwards; by turns where that fails."""
        outcomes = self._shared.round(follow)
        return outcomes if outcomes is not None else self._by_turns(self._part())

    def _part(self) -> list[Row]:
        """Give rows that shared a forward their own caches back; returns these rows."""
        rows = self._shared.part()
        self._running += rows
        return rows


def _n_left(run: Run) -> int:
    """Ids of a prompt that are still to be forwarded."""
    return len(run.request.prompt) - run.cache.offset


def _most(run: Run) -> int:
    """Most tokens of prompts in a step that ends with this one."""
    return min(_PROMPTS, run.request.prefill_chunk)


def _is_short(run: Run, most: int) -> bool:
    """Whether a prompt that nobody has begun to forward may go with others."""
    new = run.is_new and run.cache.offset == 0 and run.forwarded is None
    return new and run.on_prompt_logits is None and len(run.request.prompt) <= most


def _refusal(target: Any) -> str | None:
    if not isinstance(target, BatchTarget):
        return "the target verifies one sequence at a time"
    return target.batch_refusal
