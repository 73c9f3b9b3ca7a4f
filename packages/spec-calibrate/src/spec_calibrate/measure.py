"""Measures cost curves: a few seconds of verifies, drafts and real rounds.

Each pass visits every width once, in another order each time, so that heat and neighbours on the
machine touch all alike; a first visit warms up and is thrown away; what counts is the median.
Where one pass would take too long, fewer widths are visited. Works on anything that keeps the
contract of spec_core. Knows nothing about files.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from spec_calibrate.confidence import fit_temperatures, samples_of
from spec_calibrate.curves import Curve, Curves
from spec_calibrate.samples import Samples, doubling, widths_to_measure
from spec_core import FixedCap, Pair, Round, Sampling, generate
from spec_core.host import host_ints

TEXTS = (
    "Explain to a friend why the sky is blue at noon and red in the evening.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train leaves at 9:40 and travels 180 km at 72 km/h. When does it arrive? Show the steps.",
)
_SHARES = {"verify": 0.35, "depth": 0.25, "draft": 0.15, "rounds": 0.25}  # of the budget
_SHALLOW = 64  # tokens of context that the widths are measured on, as deep as the rounds run
_DEEP = 2048  # tokens of context for the second depth, if the prefill is affordable
_LEAST_DEEP = 512
_MOST_PASSES = 25
_PASSES = 3  # fewer are made only when even the fewest widths take too long
_MOST_ROUNDS = 24  # of one prompt with one cap
NOISY = 0.15
"""Relative spread above which a measurement is repeated, and flagged if it stays."""
_PATIENCE = 3.0  # budgets after which a slow machine is given up on: no repeats, fewer rounds
_CHUNK = 256
_MIN_CONFIDENCES = 30  # drafts with a confidence before it is believed
_FREE = 0.01  # of a plain step: a draft that costs less is free
_MIN_ROUNDS = 4  # rounds of a source before what they cost is believed
_MIN_TRIALS = 6  # drafts seen at a position before its acceptance is believed

Clock = Callable[[], float]


def measure(
    pair: Pair,
    *,
    max_draft: int | None = None,
    budget_s: float = 5.0,
    prompts: Sequence[Sequence[int]] | None = None,
    clock: Clock = time.perf_counter,
) -> Curves:
    """Measure what rounds cost with this pair on this machine.

    A measurement whose spread is large is repeated once, and the steadier one is kept; what is
    left of the spread is in `Curves.noise`.

    Args:
        pair: Target and drafter; with a tokenizer, real text is used.
        max_draft: Largest cap to measure; the pair's without.
        budget_s: Seconds to spend, about; prefill and compilation come on top.
        prompts: Ids of prompts that drafts are tried on; a few built-in texts without.
        clock: Seconds, rising.

    Raises:
        ValueError: the budget is not positive.
    """
    if not budget_s > 0:
        raise ValueError(f"[calibrate] budget_s must be > 0, got {budget_s}.")
    start = clock()
    first = _Measurement(pair, max_draft, budget_s, prompts, clock).curves()
    if first.noise <= NOISY or clock() - start > _PATIENCE * budget_s:
        return first
    second = _Measurement(pair, max_draft, budget_s, prompts, clock).curves()
    return min(first, second, key=lambda curves: curves.noise)


class _Measurement:
    """One measurement: the pair, its time and what has been found."""

    def __init__(
        self,
        pair: Pair,
        max_draft: int | None,
        budget_s: float,
        prompts: Sequence[Sequence[int]] | None,
        clock: Clock,
    ) -> None:
        self.pair, self.clock, self.budget_s = pair, clock, budget_s
        own = pair.max_draft
        self.max_draft = own if max_draft is None else min(max_draft, own)
        self.taps = pair.taps
        self.prompts = [list(p) for p in prompts] if prompts else self.own_prompts()
        self.rng = random.Random(0)
        self.began = clock()
        self.given: dict[str, int] = {}  # most drafts that a source gave

    def own_prompts(self) -> list[list[int]]:
        tokenizer, vocab = self.pair.tokenizer, self.pair.target.vocab_size
        if tokenizer is not None:
            found = [tokenizer.encode(text) for text in TEXTS]
            if all(found):
                return found
        return [[(i * i + 7 * n) % vocab for i in range(24)] for n in range(len(TEXTS))]

    def filler(self, n: int) -> list[int]:
        """As many tokens of the prompts, over and over: n of them, repeated."""
        line = [token for prompt in self.prompts for token in prompt]
        return (line * (n // len(line) + 1))[:n]

    def curves(self) -> Curves:
        """Everything, in order."""
        shallow = self.room(_SHALLOW)
        cache = self.filled(shallow)
        per_token_s = (self.clock() - self.began) / shallow
        samples = self.verify_on(cache, widths_to_measure(self.max_draft + 1), self.share("verify"))
        near = samples.curve()
        plain_s, rounds = self.play()
        overhead_s, draft = _balance(rounds, near, self.draft_curves(rounds, near))
        verify = ((shallow, near),)
        deep = self.affordable_depth(per_token_s)
        if deep > 2 * shallow:
            verify = (*verify, (deep, self.deeper(near, deep)))
        depths = tuple(depth for depth, _ in verify)
        growth = [curve(1) - near(1) for _, curve in verify]
        return Curves(
            verify=verify,
            plain=Curve(depths, tuple(plain_s + more for more in growth)),
            draft=draft,
            overhead_s=overhead_s,
            acceptance=_acceptance(rounds, self.max_draft),
            noise=samples.noise,
            max_draft=self.max_draft,
            temperatures=_temperatures(rounds),
            blocks=self.blocks(draft, plain_s),
        )

    def blocks(self, draft: dict[str, Curve], plain_s: float) -> dict[str, int]:
        """Most drafts of each source that costs something; what a free one gives varies."""
        return {
            source: n
            for source, n in self.given.items()
            if source in draft
            and 0 < n < self.max_draft
            and draft[source].seconds[-1] > _FREE * plain_s
        }

    def share(self, part: str) -> float:
        return self.budget_s * _SHARES[part]

    # -- verify ----------------------------------------------------------------------------------

    def room(self, depth: int) -> int:
        """The depth, or what the target's context leaves beside a block."""
        limit = self.pair.target.context_length
        return depth if limit is None else max(1, min(depth, limit - self.max_draft - 1))

    def filled(self, depth: int) -> Any:
        """A cache that holds that many tokens."""
        cache, tokens = self.pair.target.make_cache(), self.filler(depth)
        for start in range(0, depth, _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            output = self.pair.target.prefill(chunk, cache, taps=self.taps)
            mx.eval(output.taps)
        return cache

    def verify_on(self, cache: Any, widths: Sequence[int], budget_s: float) -> Samples:
        """Times of a verify and its rollback, by width."""
        target = self.pair.target
        block = mx.array(self.filler(max(widths)), mx.int32)

        def once(width: int) -> float:
            start = self.clock()
            output = target.verify(block[:width], cache, taps=self.taps)
            mx.async_eval(output.taps)
            host_ints(mx.argmax(output.logits, axis=-1))  # sync: the work to be timed
            target.commit(cache, 0)
            return self.clock() - start

        return self.passes(widths, once, budget_s)

    def affordable_depth(self, per_token_s: float) -> int:
        """How deep a context can be filled for the second depth; 0 where it is not worth it."""
        deep = self.room(_DEEP)
        if per_token_s > 0:
            deep = min(deep, int(0.6 * self.share("depth") / per_token_s))
        return deep if deep >= _LEAST_DEEP else 0

    def deeper(self, near: Curve, deep: int) -> Curve:
        """The verify curve in a deep context, from a few widths.

        The cost per token of context is fitted as a straight line in the width, which is what
        attention over more rows adds.
        """
        widths = sorted({near.at[0], near.at[len(near.at) // 2], near.at[-1]})
        samples = self.verify_on(self.filled(deep), widths, 0.4 * self.share("depth"))
        growth = [m - near(w) for w, m in zip(samples.places, samples.medians, strict=True)]
        slope, base = 0.0, growth[0]
        if len(growth) > 1:
            slope, base = statistics.linear_regression(samples.places, growth)
        return Curve(
            near.at,
            tuple(
                s + max(0.0, base + slope * w) for w, s in zip(near.at, near.seconds, strict=True)
            ),
        )

    # -- draft and rounds ------------------------------------------------------------------------

    def play(self) -> tuple[float, list[tuple[Round, float]]]:
        """Real rounds: seconds of a plain step, and drafted rounds with their times.

        Plain steps and drafted rounds take turns, prompt by prompt, after a warm-up.
        """
        caps = sorted({0, self.max_draft, (self.max_draft + 1) // 2}) if self.max_draft else [0]
        if self.clock() - self.began > self.budget_s:  # a slow machine: only what is needed
            caps = [caps[0], caps[-1]] if self.max_draft else caps
        else:
            for cap in caps:
                self.some_rounds(self.prompts[0], cap, 1, self.clock())
        plain: list[float] = []
        rounds: list[tuple[Round, float]] = []
        start, n_turns = self.clock(), 0
        late = self.began + _PATIENCE * self.budget_s
        while not n_turns or (
            n_turns < _MOST_PASSES and self.clock() - start < self.share("rounds")
        ):
            prompt = self.prompts[n_turns % len(self.prompts)]
            until = self.clock() + self.share("rounds") / len(self.prompts) / len(caps)
            for n, cap in enumerate(caps):
                if plain and rounds and self.clock() > late:
                    break
                until += n * self.share("rounds") / len(self.prompts) / len(caps)
                timed = self.some_rounds(prompt, cap, _MOST_ROUNDS, until)
                if cap:
                    rounds += timed
                else:
                    plain += [s for _, s in timed[1:]]  # the first one fills the pipeline
            n_turns += 1
        return statistics.median(plain), rounds

    def some_rounds(
        self, prompt: list[int], cap: int, n: int, until: float
    ) -> list[tuple[Round, float]]:
        """Up to n rounds after the prefill with their seconds; two at least, even if it is late."""
        timed: list[tuple[Round, float]] = []
        rounds = generate(
            self.pair, prompt, max_tokens=1 + (n + 1) * (cap + 1), cap=FixedCap(cap), stop_ids=()
        )
        next(rounds)
        start = self.clock()
        for round_ in rounds:
            now = self.clock()
            if round_.cap == cap:  # less is asked for when the end is near
                timed.append((round_, now - start))
            if len(timed) >= n or (len(timed) >= min(n, 2) and now >= until):
                break
            start = now
        return timed

    def draft_curves(self, rounds: list[tuple[Round, float]], near: Curve) -> dict[str, Curve]:
        """Seconds of a draft by cap, for each source that was seen."""
        drafter = self.pair.drafter
        if drafter is None or not self.max_draft:
            return {}
        caps = widths_to_measure(self.max_draft)
        drafter.reset()
        cache, target = self.pair.target.make_cache(), self.pair.target
        tokens = self.filler(_SHALLOW)
        drafter.observe(tokens, target.prefill(tokens, cache, taps=self.taps))
        snapshot = drafter.state()
        sources: list[str] = []

        def once(cap: int) -> float:
            drafter.restore(snapshot)
            start = self.clock()
            draft = drafter.draft(tokens[0], cap, sampling=Sampling(), key=mx.random.key(cap))
            host_ints(draft.tokens)  # sync: the work to be timed
            elapsed = self.clock() - start
            source = draft.source or drafter.name  # as the loop has it
            sources.append(source)
            self.given[source] = max(self.given.get(source, 0), draft.n_drafted)
            return elapsed

        samples = self.passes(caps, once, self.share("draft"))
        drafter.reset()
        found = {max(set(sources), key=sources.count): samples.curve()}
        for source in {r.source for r, _ in rounds} - found.keys():
            curve = _from_rounds([t for t in rounds if t[0].source == source], near)
            if curve is not None:
                found[source] = curve
        return found

    def passes(
        self, places: Sequence[int], once: Callable[[int], float], budget_s: float
    ) -> Samples:
        """Time places in turn until the budget is spent.

        A first visit goes upwards and warms up; what it takes longer than the second one, such as a
        kernel's compilation, is not on the budget. Where the narrowest place shows that there is no
        time for all, only some are visited; where even those take too long, the widest are left
        out, and the curve goes on as its last part rises.
        """
        once(places[0])
        start = self.clock()
        if once(places[0]) * len(places) * _PASSES > budget_s:
            places = doubling(places)
        seconds: dict[int, list[float]] = {}
        for place in places:
            first, second = once(place), once(place)
            start += max(0.0, first - second)
            seconds[place] = [second]
            if len(seconds) >= 3 and self.clock() - start >= budget_s:
                break
        chosen = list(seconds)
        for _ in range(_MOST_PASSES):
            if self.clock() - start >= budget_s:
                break
            for place in self.rng.sample(chosen, len(chosen)):
                seconds[place].append(once(place))
        return Samples(seconds)


def _from_rounds(rounds: list[tuple[Round, float]], near: Curve) -> Curve | None:
    """What a source's drafts cost, from rounds alone: what is left beside the verify.

    None where they are too few: blocks of a width that is new may have been compiled for.
    """
    left: dict[int, list[float]] = {}
    for round_, seconds in rounds:
        left.setdefault(round_.cap, []).append(max(0.0, seconds - near(round_.n_drafted + 1)))
    caps = sorted(cap for cap, seconds in left.items() if len(seconds) >= _MIN_ROUNDS)
    if not caps:
        return None
    return Curve(tuple(caps), tuple(sorted(left[cap])[len(left[cap]) // 4] for cap in caps))


def _balance(
    rounds: list[tuple[Round, float]], near: Curve, draft: dict[str, Curve]
) -> tuple[float, dict[str, Curve]]:
    """Overhead per round, and draft costs that together explain the real rounds.

    Measured apart, a draft and a verify each wait for the device once; in a round they wait
    together. Where the parts exceed the whole, the drafts are taken to be that much cheaper.
    """
    left = [
        seconds - near(round_.n_drafted + 1) - draft[round_.source](round_.cap)
        for round_, seconds in rounds
        if round_.source in draft
    ]
    over = statistics.median(left) if left else 0.0
    if over >= 0:
        return over, draft
    cheaper = {
        source: replace(curve, seconds=tuple(max(0.0, s + over) for s in curve.seconds))
        for source, curve in draft.items()
    }
    return 0.0, cheaper


def _acceptance(rounds: list[tuple[Round, float]], most: int) -> tuple[float, ...]:
    """Share accepted at each position among the drafts whose forerunners were accepted."""
    rates: list[float] = []
    for i in range(most):
        reached = [r for r, _ in rounds if r.n_drafted > i and r.n_accepted >= i]
        if len(reached) < _MIN_TRIALS:
            break
        rates.append(sum(r.n_accepted > i for r in reached) / len(reached))
    return tuple(rates)


def _temperatures(rounds: list[tuple[Round, float]]) -> tuple[float, ...]:
    """What the drafter's confidence is worth, from enough drafts that have one."""
    samples = samples_of(round_ for round_, _ in rounds)
    return fit_temperatures(samples) if len(samples) >= _MIN_CONFIDENCES else ()
