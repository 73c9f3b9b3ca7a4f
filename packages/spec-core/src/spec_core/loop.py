"""The only loop: draft, verify, accept, commit; yields a Round each time.

One device read a round: the accepted count, the next token, the drafts and their confidence come
over together.
Plain steps are pipelined: the next one is enqueued before the current token is read. Streaming,
stop handling, statistics and serving consume rounds; nothing reaches in here.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from spec_core.accept import accept_greedy, accept_residual
from spec_core.cap import FixedCap
from spec_core.errors import NumericsError, SpecError
from spec_core.guide import Guide
from spec_core.host import floats_as_ints, host_ints, ints_as_floats
from spec_core.pair import Pair
from spec_core.protocols import Cache, Cap, DraftAsk, Observation
from spec_core.request import Request, WholePrompt
from spec_core.sampling import Sampling, Seen, count_tokens, penalise, seen_by_row, target_probs
from spec_core.step import HEADER, NO_DRAFTS, Forwarded, Outcome, Step, check_draft, n_bad_rows
from spec_core.types import Draft, FinishReason, Round, RoundKind, TargetOutput
from spec_core.unseen import Unseen

CLEAR_EVERY = 256  # tokens: a cache that grows leaves buffers that nothing fits into again


def generate(
    pair: Pair,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    cap: Cap | None = None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    cache: Cache | None = None,
    prefill_chunk: int = 2048,
    on_prefill: Callable[[int, int], None] | None = None,
    with_logits: bool = False,
    guide: Guide | None = None,
) -> Iterator[Round]:
    """Continue a prompt; yields committed rounds until a stop or the token limit.

    Args:
        pair: Target, drafter and tokenizer.
        prompt: Ids, or text if the pair has a tokenizer (encoded as it stands, no chat template).
        max_tokens: Most tokens to emit, at least 1; fewer when the target's context ends first.
        sampling: Settings; greedy without.
        cap: How many drafts to verify a round; the drafter's whole block without. Ignored when the
            pair has no drafter.
        stop_ids: Ids that end the text; the tokenizer's without.
        stop_strings: Strings that end the text, cut just before them; need a tokenizer.
        cache: A cache of this target that already holds the first `cache.offset` ids of the prompt
            (and a drafter that has observed exactly those). A new one without. A round that broke
            off, by an error or Ctrl-C, may have committed what it did not yield: drop its cache.
        prefill_chunk: Prompt ids per forward; chunks end at multiples of it.
        on_prefill: Called with (ids done, ids in all) after each chunk.
        with_logits: Keep each round's target logits on it.
        guide: Restricts or reweights what may be drawn, such as a grammar.

    Yields:
        Rounds. The first one carries the token drawn from the prompt's logits.

    Raises:
        SpecError: the prompt is empty, too long, or holds an id outside the vocabulary.
        NumericsError: the target's logits are not numbers.
        ValueError: a setting is outside its range, or a draft breaks the contract.
        TypeError: a prompt id is no whole number.
    """
    request = Request(
        pair, prompt, max_tokens, sampling or Sampling(), stop_ids, stop_strings, prefill_chunk
    )
    run = Run(request, cap, cache, with_logits, guide)
    return run.rounds(on_prefill)


class Run:
    """One generation: the mutable state between rounds."""

    def __init__(
        self,
        request: Request,
        cap: Cap | None,
        cache: Cache | None,
        with_logits: bool,
        guide: Guide | None = None,
        on_prompt_logits: Callable[[int, mx.array], None] | None = None,
    ) -> None:
        self.request = request
        self.target = request.pair.target
        self.drafter = request.pair.drafter
        self.taps = request.pair.taps
        self.max_draft = request.pair.max_draft
        self.cap = FixedCap(self.max_draft) if self.drafter is None or cap is None else cap
        self.asked: int | None = None  # what the cap said for the next round
        self.unseen = Unseen()  # rows that the drafter is shown before it drafts
        self.has_drafted = False  # the drafter, also in a round that broke off, since the last one
        self.is_new = cache is None  # a sequence that the drafter has not begun
        self.cache = cache if cache is not None else self.target.make_cache()
        self.forwarded: WholePrompt | None = None  # with others' prompts, and not taken in yet
        self.with_logits = with_logits
        self.guide = guide
        self.on_prompt_logits = on_prompt_logits
        self.may_pipeline = guide is None or guide.fixed
        self.pipelined = self.may_pipeline
        self.in_flight = False  # a plain step has been enqueued ahead of the round handed out
        self.n_emitted = 0
        self.anchor = -1
        self.since = time.perf_counter()  # when the round in progress began
        self.keys = random.Random(request.sampling.seed)
        self.seen: Seen | None = None
        if request.sampling.penalised:
            counts = count_tokens(mx.array(request.prompt, mx.int32), self.target.vocab_size)
            self.seen = Seen(prompt=counts, answer=mx.zeros_like(counts))

    # -- the rounds ------------------------------------------------------------------------------

    def rounds(self, on_prefill: Callable[[int, int], None] | None) -> Iterator[Round]:
        """All rounds, the first one included."""
        try:
            for first in self.prefill():
                if on_prefill is not None:
                    on_prefill(self.cache.offset, len(self.request.prompt))
                if first is None:
                    continue
                self.cap.observe(first)
                yield first
                self.resume()
                if first.finish_reason is None:
                    yield from self.decode()
        finally:
            self.close()

    def decode(self) -> Iterator[Round]:
        """The rounds after the first one."""
        done = False
        while not done:
            cap = self.take_cap()
            for round_ in self.plain_steps() if cap < 1 else self.one_round(cap):
                self.cap.observe(round_)
                done = round_.finish_reason is not None
                yield round_
                self.resume()

    def resume(self) -> None:
        """Start the clock of the next round, unless it has been computed meanwhile."""
        self.since = self.since if self.in_flight else time.perf_counter()

    def close(self) -> None:
        """Abandon a block that is still open, and let the drafter see what it has not seen."""
        if self.cache.is_open:
            self.target.commit(self.cache, 0)
        self.unseen.show()

    def prefill(self) -> Iterator[Round | None]:
        """Forward the prompt chunk by chunk; yields None between chunks and the first round."""
        prompt, size = self.request.prompt, self.request.prefill_chunk
        if self.on_prompt_logits is not None:
            size = min(size, self.request.pair.max_block or size)
        if self.is_new and self.drafter is not None:
            self.drafter.reset()
        start, self.since = self.cache.offset, time.perf_counter()
        if start >= len(prompt):
            raise SpecError(
                f"[generate] At least one prompt id must be left to forward, got a cache of "
                f"{start} for {len(prompt)}. Roll the cache back by one."
            )
        while True:
            end = min((start // size + 1) * size, len(prompt))
            chunk = prompt[start:end]
            output = self.forward_prompt(chunk)
            if self.drafter is not None:
                self.drafter.observe(chunk, output)
            if end == len(prompt):
                break
            paused = time.perf_counter()
            yield None
            start, self.since = end, self.since + time.perf_counter() - paused
        yield self.finish(self.decide(NO_DRAFTS, output), "prefill")

    def forward_prompt(self, chunk: list[int]) -> TargetOutput:
        """One chunk of the prompt; logits of its last row, and of all rows to whoever asked."""
        if self.forwarded is not None:
            done, self.forwarded = self.forwarded, None
            self.cache, self.since = done.cache, self.since - done.elapsed_s
            return done.output
        if self.on_prompt_logits is None:
            return self.target.prefill(chunk, self.cache, taps=self.taps)
        start = self.cache.offset
        output = self.target.verify(mx.array(chunk, mx.int32), self.cache, taps=self.taps)
        self.on_prompt_logits(start, output.logits)
        self.target.commit(self.cache, len(chunk))
        return TargetOutput(output.logits[-1:], output.taps)

    def one_round(self, cap: int) -> Iterator[Round]:
        """Draft, verify, accept, commit. Without a draft this is a plain step."""
        ask = self.ask(cap)
        draft = self.checked(ask, ask.alone())
        step = self.enqueue(mx.array([self.anchor], mx.int32), draft)
        yield self.finish(step, "verify" if draft.n_drafted else "plain", cap=cap)

    def ask(self, cap: int) -> DraftAsk:
        """What the drafter is asked in this round, at least 1 token; takes the round's key."""
        assert self.drafter is not None
        self.unseen.show()
        self.has_drafted = True
        return DraftAsk(self.drafter, self.anchor, cap, self.request.sampling, self.next_key())

    def checked(self, ask: DraftAsk, draft: Draft) -> Draft:
        """A draft that keeps the contract, with its source."""
        check_draft(draft, ask.drafter.name, ask.cap, self.target.vocab_size)
        return draft if draft.source else replace(draft, source=ask.drafter.name)

    def plain_steps(self) -> Iterator[Round]:
        """Steps of one row, each enqueued before the one before it is read."""
        step = self.enqueue(mx.array([self.anchor], mx.int32), NO_DRAFTS)
        while True:
            following = None
            if self.pipelined and self.n_left > 1 and min(self.ask_cap(), self.max_draft) < 1:
                self.asked = None
                self.target.commit(self.cache, 1)
                following = self.enqueue(step.outcome.next_token[None], NO_DRAFTS)
            round_ = self.finish(step, "plain", committed=following is not None)
            self.in_flight = following is not None and round_.finish_reason is None
            yield round_
            if following is None or round_.finish_reason is not None:
                return
            step = following

    # -- parts of a round ------------------------------------------------------------------------

    @property
    def n_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.n_emitted

    def ask_cap(self) -> int:
        """The cap for the next round; asked once, also when it ends a run of plain steps."""
        if self.asked is None:
            self.asked = self.cap.next()
        return self.asked

    def take_cap(self) -> int:
        """How many drafts the round that begins now may hold."""
        cap = min(self.ask_cap(), self.max_draft, self.n_left - 1)
        self.asked = None
        return cap

    def next_key(self) -> mx.array:
        """Fresh randomness; made on the host, so that no chain of splits grows on the device."""
        return mx.random.key(self.keys.getrandbits(63))

    def enqueue(self, anchor_row: mx.array, draft: Draft) -> Step:
        """Verify the anchor and a draft, decide, and start computing."""
        block = anchor_row
        if draft.n_drafted:
            # MLX does not check bounds; the accept rule refuses what is clipped here.
            drafts = mx.clip(draft.tokens, 0, self.target.vocab_size - 1).astype(mx.int32)
            block = mx.concatenate([anchor_row, drafts])  # (K + 1,)
        output = self.target.verify(block, self.cache, taps=self.taps)
        step = self.decide(draft, output)
        mx.async_eval(step.packed)
        return step

    def decide(self, draft: Draft, output: TargetOutput) -> Step:
        """The accept rule on the target's settings, packed for one read."""
        sampling, logits = self.request.sampling, output.logits
        if self.seen is not None:
            seen = seen_by_row(self.seen, draft.tokens)
            logits = penalise(logits, sampling, seen)
        if self.guide is not None:
            drafts: list[int] = []
            if not self.guide.fixed:
                known = mx.clip(draft.tokens, 0, self.target.vocab_size - 1)
                drafts = host_ints(known)  # sync: a grammar walks the drafts on the host
            logits = logits.astype(mx.float32) + self.guide.bias(drafts)
        if sampling.greedy:
            outcome = accept_greedy(logits, draft.tokens, output.logits.dtype)
        else:
            probs = target_probs(logits, sampling)
            outcome = accept_residual(probs, draft.tokens, draft.probs, self.next_key())
        if self.seen is not None and draft.n_drafted == 0:
            # Known before the read, so that pipelined steps see it; blocks add theirs in finish().
            counts = self.seen.answer.at[outcome.next_token].add(1.0)
            self.seen = Seen(self.seen.prompt, counts)
        header = [outcome.n_accepted, outcome.next_token, outcome.near_ties]
        header.append(n_bad_rows(logits[None], outcome.n_accepted[None])[0])
        parts = [mx.stack(header), draft.tokens.astype(mx.int32)]
        if draft.confidence is not None:
            parts.append(floats_as_ints(draft.confidence))
        return Step(draft, output, outcome, mx.concatenate(parts))

    def finish(
        self, step: Step, kind: RoundKind, *, cap: int = 0, committed: bool = False
    ) -> Round:
        """Read the outcome, cut at a stop, commit, let the drafter observe."""
        outcome = self.choose(step, host_ints(step.packed))  # sync: the one read of the round
        if kind != "prefill" and not committed:
            self.target.commit(self.cache, len(outcome.tokens))
        kept = None if kind == "prefill" else self.kept(step, outcome)
        return self.record(step, outcome, kind, cap, kept)

    def choose(self, step: Forwarded, values: list[int]) -> Outcome:
        """What the packed values say, cut at a stop."""
        n_accepted, next_token, near_ties, n_bad = values[:HEADER]
        if n_bad:
            raise NumericsError(
                "[generate] The target's logits must be numbers, got NaN or infinity. The "
                "weights, the compute type or a penalty overflow; no token was taken from them."
            )
        n_drafted, confidence = step.draft.n_drafted, None
        drafts = values[HEADER : HEADER + n_drafted]
        if any(token < 0 for token in drafts):
            self.park()
        if step.draft.confidence is not None:
            confidence = ints_as_floats(values[HEADER + n_drafted :])
        tokens, text, reason = self.cut([*drafts[:n_accepted], next_token])
        return Outcome(tokens, text, reason, drafts, n_accepted, near_ties, confidence)

    def park(self) -> None:
        """Decode plainly from here on: what the drafter computes is no numbers."""
        assert self.drafter is not None
        self.max_draft = 0
        warnings.warn(
            f'[draft] Drafter "{self.drafter.name}" must compute numbers, got NaN or infinity. It '
            "drafts no more in this text, which stays the target's own. Its weights are damaged, "
            "or overflow in its compute type.",
            RuntimeWarning,
            stacklevel=2,
        )

    def record(
        self, step: Forwarded, outcome: Outcome, kind: RoundKind, cap: int, kept: Observation | None
    ) -> Round:
        """After the commit: show the drafter what it is to see, count, make the round."""
        tokens, drafts, n_keep = outcome.tokens, outcome.drafts, len(outcome.tokens)
        if kept is not None:  # a sampled row's drafter sees what it sees alone, to the bit
            self.unseen.add(kept, wait=not self.has_drafted and self.request.sampling.greedy)
        self.has_drafted = False
        if self.guide is not None:
            self.guide.advance(tokens)
        if self.seen is not None and drafts:
            counts = self.seen.answer.at[mx.array(tokens, mx.int32)].add(1.0)
            self.seen = Seen(self.seen.prompt, counts)
        self.anchor = tokens[-1]
        if self.n_emitted // CLEAR_EVERY < (self.n_emitted + n_keep) // CLEAR_EVERY:
            mx.clear_cache()
        self.n_emitted += n_keep
        now = time.perf_counter()
        elapsed_s, self.since = now - self.since, now
        return Round(
            tokens=tuple(tokens),
            text=outcome.text,
            kind=kind,
            n_drafted=step.draft.n_drafted,
            n_accepted=outcome.n_accepted,
            source=step.draft.source,
            near_ties=outcome.near_ties,
            elapsed_s=elapsed_s,
            finish_reason=outcome.reason,
            logits=step.output.logits[:n_keep] if self.with_logits else None,
            offset=self.cache.offset,
            cap=cap,
            confidence=outcome.confidence,
        )

    def kept(self, step: Forwarded, outcome: Outcome) -> Observation | None:
        """The rows of a round that its drafter is shown; None without one."""
        if self.drafter is None:
            return None
        output, n_keep = step.output, len(outcome.tokens)
        kept = TargetOutput(output.logits[:n_keep], tuple(t[:n_keep] for t in output.taps))
        return Observation(self.drafter, [self.anchor, *outcome.drafts][:n_keep], kept)

    def cut(self, tokens: list[int]) -> tuple[list[int], str, FinishReason | None]:
        """Keep tokens up to a stop; returns (kept ids, final text, reason).

        The cap leaves room for the token after the drafts, so there are never more than n_left.
        """
        request, stream, text = self.request, self.request.text, ""
        for n, token in enumerate(tokens, 1):
            if token in request.stop_ids:
                return tokens[:n], text + (stream.finish() if stream else ""), "stop"
            if stream is not None:
                text += stream.push(token)
                if stream.stopped:
                    return tokens[:n], text, "stop"
        if len(tokens) < self.n_left:
            return tokens, text, None
        if stream is not None:
            text += stream.finish()
            if stream.stopped:
                return tokens, text, "stop"
        return tokens, text, "length"
