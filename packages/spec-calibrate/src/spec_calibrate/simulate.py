"""A scripted machine and drafter on a simulated clock, to test and tune caps.

A scenario gives the cost of each round and the chance that each draft is accepted. Chance is drawn
per place in the text and position in the draft, so every cap meets the same text: the best fixed
cap in hindsight is found by trying them all. Calls a cap in the order in which the loop does, plain
steps one ahead. Knows nothing about models, and no clock is read.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_calibrate.curves import Curve, Curves
from spec_core import Cap, FixedCap, Round
from spec_core.types import RoundKind

_NO_TOKENS = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What rounds cost, in seconds.

    Attributes:
        name: Shown in tables.
        plain_s: A pipelined plain step.
        verify_s: By width, at the start of the context.
        draft_s: By cap.
        overhead_s: Per round that is not a pipelined plain step.
        depth_s: Added to a verify per row and token of context, and to a plain step as one row.
    """

    name: str
    plain_s: float
    verify_s: Callable[[int], float]
    draft_s: Callable[[int], float]
    overhead_s: float
    depth_s: float = 0.0

    def curves(self, max_draft: int, *, error: float = 0.0, seed: int = 0) -> Curves:
        """What a calibration would have found, each cost off by a relative `error`."""
        rng = random.Random(seed)

        def off(seconds: float) -> float:
            return seconds * max(0.5, rng.gauss(1.0, error))

        widths = tuple(range(1, max_draft + 2))
        depths = (0, 2048) if self.depth_s else (0,)
        verify = tuple(
            (d, Curve(widths, tuple(off(self.verify_s(w) + self.depth_s * w * d) for w in widths)))
            for d in depths
        )
        caps = widths[:-1]
        return Curves(
            verify=verify,
            plain=Curve(depths, tuple(off(self.plain_s + self.depth_s * d) for d in depths)),
            draft={"scripted": Curve(caps, tuple(self.draft_s(c) for c in caps))},
            overhead_s=self.overhead_s,
            max_draft=max_draft,
        )


Accept = Callable[[int, int], float]
"""Probability that the draft for (place in the text, 0-based position in the draft) is accepted."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One text on one machine.

    Attributes:
        name: Shown in tables.
        machine: Costs.
        accept: Acceptance process.
        n_tokens: Length of the text.
        max_draft: Largest cap.
        offers: Drafts the drafter has at a place in the text; its whole block without.
        drift: Factor on the costs of a round, by share of the text done and width (0 for plain).
        noise: Relative spread of times; one round in a hundred takes about three times as long.
        depth: Tokens of context before the text.
        curve_error: Relative error of the curves that the controller is given.
        believed: Machine that was calibrated, where it is not the one that runs.
    """

    name: str
    machine: Machine
    accept: Accept
    n_tokens: int = 1500
    max_draft: int = 8
    offers: Callable[[int], int] | None = None
    drift: Callable[[float, int], float] | None = None
    noise: float = 0.04
    depth: int = 0
    curve_error: float = 0.03
    believed: Machine | None = None

    def curves(self, seed: int = 0) -> Curves:
        """The calibration that the controller is given."""
        machine = self.believed or self.machine
        return machine.curves(self.max_draft, error=self.curve_error, seed=seed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cap made of a scenario.

    Attributes:
        seconds: Simulated time.
        n_tokens: Tokens of the text.
        caps: The cap of each round, 0 for plain steps.
    """

    seconds: float
    n_tokens: int
    caps: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cap against hindsight.

    Attributes:
        name: The scenario.
        rate: Tokens per second of the cap under test.
        plain: Tokens per second of plain decoding.
        fixed: Tokens per second of each fixed cap, 0 first.
    """

    name: str
    rate: float
    plain: float
    fixed: tuple[float, ...]

    @property
    def best_fixed(self) -> int:
        """The fixed cap that would have been best."""
        return max(range(len(self.fixed)), key=self.fixed.__getitem__)

    @property
    def of_best(self) -> float:
        """Speed as a share of the best fixed cap's."""
        return self.rate / max(self.fixed)

    @property
    def of_plain(self) -> float:
        """Speed as a share of plain decoding's."""
        return self.rate / self.plain


class _Text:
    """One run of a scenario: where it is, and the chance it meets."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.done = 0
        self.seconds = 0.0
        self.caps: list[int] = []
        self._chance = random.Random(f"accept {seed}")
        self._draws: list[list[float]] = []
        self._noise = random.Random(f"noise {seed}")

    @property
    def n_left(self) -> int:
        """Tokens to go."""
        return self.scenario.n_tokens - self.done

    def draw(self, place: int, i: int) -> float:
        """The same number for the same place and position, whatever the cap."""
        while len(self._draws) <= place:
            n = self.scenario.max_draft
            self._draws.append([self._chance.random() for _ in range(n)])
        return self._draws[place][i]

    def spend(self, seconds: float, width: int) -> float:
        """Time of a round with its noise and drift; moves the clock."""
        scenario = self.scenario
        if scenario.drift is not None:
            seconds *= scenario.drift(self.done / scenario.n_tokens, width)
        if scenario.noise:
            seconds *= max(0.5, self._noise.gauss(1.0, scenario.noise))
            if self._noise.random() < 0.01:
                seconds *= self._noise.uniform(2.0, 4.0)
        self.seconds += seconds
        return seconds

    def round(
        self, kind: RoundKind, cap: int, n_drafted: int, n_accepted: int, elapsed_s: float
    ) -> Round:
        n = min(n_accepted + 1, self.n_left)
        self.done += n
        return Round(
            tokens=(_NO_TOKENS,) * n,
            text="",
            kind=kind,
            n_drafted=n_drafted,
            n_accepted=n_accepted,
            source="scripted" if cap else "target",
            near_ties=0,
            elapsed_s=elapsed_s,
            finish_reason=None if self.n_left else "length",
            offset=self.scenario.depth + self.done,
            cap=cap,
        )

    def drafted(self, cap: int) -> Round:
        """Draft, verify, accept."""
        scenario, machine, place = self.scenario, self.scenario.machine, self.done
        n = cap if scenario.offers is None else min(cap, scenario.offers(place))
        n_accepted = 0
        while n_accepted < n and self.draw(place, n_accepted) < scenario.accept(place, n_accepted):
            n_accepted += 1
        depth_s = machine.depth_s * (n + 1) * (scenario.depth + place)
        seconds = machine.draft_s(cap) + machine.verify_s(n + 1) + machine.overhead_s + depth_s
        self.caps.append(cap)
        kind: RoundKind = "verify" if n else "plain"
        return self.round(kind, cap, n, n_accepted, self.spend(seconds, n + 1))

    def plain(self, *, filling: bool) -> Round:
        """A plain step; the first one of a pipeline also pays for filling it."""
        machine = self.scenario.machine
        seconds = machine.plain_s + machine.depth_s * (self.scenario.depth + self.done)
        if filling:
            seconds += machine.overhead_s
        self.caps.append(0)
        return self.round("plain", 0, 0, 0, self.spend(seconds, 0))


def run(scenario: Scenario, cap: Cap, seed: int = 0) -> Outcome:
    """Play a scenario with a cap, in the loop's order of calls."""
    text = _Text(scenario, seed)
    cap.observe(text.round("prefill", 0, 0, 0, 0.0))
    asked = None
    while text.n_left:
        asked = cap.next() if asked is None else asked
        n, asked = min(asked, scenario.max_draft, text.n_left - 1), None
        if n >= 1:
            cap.observe(text.drafted(n))
            continue
        filling = True
        while text.n_left:
            following = False
            if text.n_left > 1:
                asked = cap.next()
                following = min(asked, scenario.max_draft) < 1
                asked = None if following else asked
            cap.observe(text.plain(filling=filling))
            filling = False
            if not following:
                break
    return Outcome(text.seconds, scenario.n_tokens, tuple(text.caps))


def judge(scenario: Scenario, make_cap: Callable[[Curves], Cap], seeds: Sequence[int]) -> Verdict:
    """Hold a cap against every fixed cap on the same texts; rates over all seeds together."""
    n = scenario.n_tokens * len(seeds)
    fixed = tuple(
        n / sum(run(scenario, FixedCap(k), seed).seconds for seed in seeds)
        for k in range(scenario.max_draft + 1)
    )
    seconds = sum(run(scenario, make_cap(scenario.curves(seed)), seed).seconds for seed in seeds)
    return Verdict(scenario.name, n / seconds, fixed[0], fixed)
