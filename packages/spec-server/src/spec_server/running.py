"""One generation between the batch and its job: rounds in, events out."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from spec_core import Drafter, FixedCap, Pair, Round, StatsMeter
from spec_core.batch import Batch, Row
from spec_core.text import TextStream
from spec_server.guides import Grammars, make_guide
from spec_server.jobs import (
    ENDLESS,
    End,
    Event,
    Figures,
    Job,
    Piece,
    Progress,
    Scored,
    Served,
    TokenInfo,
    TokenText,
)
from spec_server.metrics import Metrics
from spec_server.prefix import Hit, Rungs
from spec_server.words import Words, marks_of

_SCORED_CHUNK = 64  # prompt tokens whose logits are held at once


class Machinery:
    """What all generations of an engine share.

    Args:
        served: The loaded pair.
        metrics: Where counts go.
    """

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self.served = served
        self.metrics = metrics
        self.words = Words(served.pair.tokenizer)
        self.marked_words = Words(served.pair.tokenizer, marks_of(served.pair.tokenizer))

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled on the first request for structured output."""
        words = self.words
        return Grammars(words.hf, self.served.pair.target.vocab_size, sorted(words.stop_ids))

    def begin(
        self,
        job: Job,
        batch: Batch,
        drafter: Drafter | None,
        hit: Hit | None,
        prefill_chunk: int,
        rung_bytes: int = 0,
    ) -> "Generation":
        """Put a job into the batch.

        Args:
            job: What is asked.
            batch: Where it is decoded.
            drafter: Its own.
            hit: A state to go on from.
            prefill_chunk: Prompt tokens per forward.
            rung_bytes: Most bytes of what it leaves on its way through the prompt.
        """
        ask = job.ask
        words = self.marked_words if ask.show_markers else self.words
        pair = Pair(self.served.pair.target, drafter, words)
        guide = make_guide(
            self.grammars if ask.grammar is not None else None,
            ask,
            pair.target.vocab_size,
        )
        generation = Generation(self, job, words, drafter, hit, rung_bytes)
        generation.row = batch.add(
            pair,
            ask.forwarded,
            max_tokens=max(ask.max_tokens, 1),  # the loop draws one; it is left out for none
            sampling=ask.sampling,
            cap=self.served.make_cap(ask.max_draft),
            stop_strings=ask.stops(),
            cache=hit.cache if hit is not None else None,
            prefill_chunk=min(prefill_chunk, _SCORED_CHUNK) if ask.score_prompt else prefill_chunk,
            on_prefill=generation.forwarded,
            with_logits=ask.top_logprobs is not None,
            guide=guide,
            on_prompt_logits=generation.score if ask.score_prompt else None,
            tag=generation,
        )
        return generation


class Generation:
    """One job being worked on.

    Attributes:
        row: Its place in the batch.
        drafter: Its own.
    """

    row: Row

    def __init__(
        self,
        machinery: Machinery,
        job: Job,
        words: Words,
        drafter: Drafter | None,
        hit: Hit | None,
        rung_bytes: int,
    ) -> None:
        self.job = job
        self._machinery = machinery
        self.drafter = drafter
        self._n_cached = hit.n_tokens if hit is not None else 0
        self._rungs = Rungs(
            machinery.served.pair.target, rung_bytes, hit.rungs if hit is not None else None
        )
        self._meter = StatsMeter()
        self._first_s = 0.0
        self._scored: list[TokenInfo] = [TokenInfo(job.ask.prompt[0])]
        self._ids: list[int] = []
        self._drafts: dict[int, Any] = {}
        self._by_token: TextStream | None = None
        if job.ask.by_token:
            self._by_token = TextStream(words.decode, job.ask.stops(), job.ask.prompt[-4:])

    @property
    def n_emitted(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def forwarded(self, row: Row, done: int, total: int) -> None:
        """A chunk of the prompt has been forwarded."""
        self.job.sink(Progress(done, total))
        self._rungs.add(row.run.cache)
        if self.drafter is not None and self.drafter.taps:
            rungs = self._rungs.by_length
            before = max(self._drafts, default=0)  # kept with this one, and those at rungs
            self._drafts = {n: d for n, d in self._drafts.items() if n == before or n in rungs}
            self._drafts[done] = self.drafter.state()

    def score(self, start: int, logits: mx.array) -> None:
        """Log-probabilities of the prompt's tokens behind each row of a chunk."""
        following = self.job.ask.prompt[start + 1 : start + 1 + logits.shape[0]]
        self._scored += token_logprobs(following, logits, self.job.ask.top_logprobs or 0)

    def take(self, round_: Round) -> list[Event]:
        """The events of one round."""
        ask, meter = self.job.ask, self._meter
        if not self._ids:
            self._first_s = time.perf_counter() - self.job.queued_at
        meter.add(round_)
        if round_.kind == "prefill":
            self._count_prompt()
        self._ids += round_.tokens
        events: list[Event] = []
        if ask.score_prompt and round_.kind == "prefill":
            events.append(Scored(tuple(self._scored)))
        if ask.max_tokens == 0:
            figures = replace(self._figures(), completion_tokens=0)
            return [*events, Piece("", ()), End("length", None, figures)]
        texts = self._texts(round_) if ask.by_token else ()
        events.append(Piece(round_.text, self._tokens(round_), texts))
        if round_.finish_reason is not None:
            events.append(End(round_.finish_reason, self.row.stopped_by, self._figures()))
        return events

    def state(self, cache: Any) -> tuple[list[int], Any, dict[int, Any], dict[int, Any]]:
        """The ids that a closed cache stands for, the cache; drafter contexts, rungs by length."""
        n = cache.offset if cache is not None else 0
        tokens = [*self.job.ask.prompt, *self._ids][:n]
        drafts = dict(self._drafts)
        if self.drafter is not None and self.drafter.taps and self._ids:
            drafts[n] = self.drafter.state()
        return tokens, cache, drafts, self._rungs.by_length

    # -- parts of an event -----------------------------------------------------------------------

    def _count_prompt(self) -> None:
        metrics = self._machinery.metrics
        metrics.prompt_tokens.inc(len(self.job.ask.prompt))
        metrics.cached_tokens.inc(self._n_cached)
        metrics.first_token.observe(self._first_s)

    def _tokens(self, round_: Round) -> tuple[TokenInfo, ...]:
        tokens = round_.tokens
        if tokens[-1] in self._machinery.words.stop_ids:
            tokens = tokens[:-1]
        n_top = self.job.ask.top_logprobs
        if n_top is None or round_.logits is None:
            return tuple(TokenInfo(t) for t in tokens)
        return token_logprobs(tokens, round_.logits, n_top)

    def _texts(self, round_: Round) -> tuple[TokenText, ...]:
        """Text by token: accepted drafts come from the drafter, the last token from the target."""
        stream, texts = self._by_token, []
        assert stream is not None
        for i, token in enumerate(round_.tokens):
            if token in self._machinery.words.stop_ids or stream.stopped:
                break
            origin = round_.source if i < round_.n_accepted else "target"
            texts.append(TokenText(stream.push(token), origin))
        if round_.finish_reason is not None and (rest := stream.finish()):
            texts.append(TokenText(rest, texts[-1].origin if texts else "target"))
        return tuple(t for t in texts if t.text)

    def _figures(self) -> Figures:
        stats = self._meter.result()
        figures = Figures(
            prompt_tokens=len(self.job.ask.prompt),
            cached_tokens=self._n_cached,
            completion_tokens=stats.n_tokens,
            mode=self._machinery.served.mode if self._drafted_at_all() else "baseline",
            acceptance_length=stats.acceptance_length,
            drafted=stats.n_drafted,
            accepted=stats.n_accepted,
            tokens_per_second=stats.tokens_per_second,
            time_to_first_token=self._first_s,
            max_draft=self._cap_given(),
            notices=self._notices(),
        )
        metrics = self._machinery.metrics
        metrics.acceptance.observe(figures.acceptance_length)
        if figures.tokens_per_second > 0:
            metrics.per_token.observe(1 / figures.tokens_per_second)
        return figures

    def _cap_given(self) -> int | str:
        """The cap that held: a fixed one is cut to the drafter's block, any other one adapts."""
        cap, most = self.row.run.cap, self._most()
        return min(cap.n, most) if isinstance(cap, FixedCap) else "auto"

    def _notices(self) -> tuple[str, ...]:
        ask, notices = self.job.ask, []
        wish, given = ask.max_draft, self._cap_given()
        if wish is not None and isinstance(given, int) and wish > given:
            notices.append(
                f"At most {given} tokens are drafted a round; max_draft {wish} is cut to that."
            )
        room = self.row.run.request.max_tokens
        if room < ask.max_tokens < ENDLESS:
            notices.append(
                f"The context holds {room} tokens after this prompt; the limit of "
                f"{ask.max_tokens} is cut to that."
            )
        return tuple(notices)

    def _most(self) -> int:
        return self.row.run.request.pair.max_draft

    def _drafted_at_all(self) -> bool:
        return self.drafter is not None and self.job.ask.max_draft != 0


def token_logprobs(tokens: Sequence[int], logits: mx.array, n_top: int) -> tuple[TokenInfo, ...]:
    """Log-probabilities of emitted tokens and of the most likely ones.

    Args:
        tokens: Emitted ids.
        logits: Shape (len(tokens) or more, V), before temperature and penalties.
        n_top: Alternatives per token.
    """
    if not tokens:
        return ()
    rows = logits[: len(tokens)].astype(mx.float32)
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.array(list(tokens), mx.int32)[:, None], axis=-1)[:, 0]
    best = mx.argsort(-logprobs, axis=-1)[:, :n_top]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    mx.eval(chosen, best, values)  # sync: log-probabilities were asked for
    own: Any = chosen.tolist()
    ids: Any = best.tolist()
    tops: Any = values.tolist()
    return tuple(
        TokenInfo(
            token, min(lp, 0.0), tuple((int(i), min(v, 0.0)) for i, v in zip(a, b, strict=True))
        )
        for token, lp, a, b in zip(tokens, own, ids, tops, strict=True)
    )
