"""The cap for the next round: the one that commits most tokens per second.

Each round teaches two things: how many drafts were accepted (`acceptance`) and how long it took
(`costs`). The cap with the best expected ratio is used; where no cap beats a plain step the
controller parks. What it has not seen lately it tries now and then, from an allowance that is a
small share of the time spent, so a hopeless drafter costs about that share and no more. Knows
nothing about models; one controller serves one pair, over as many sequences as you like.

References:
    Renewal reward: the long-run rate of a cap is E[tokens] / E[seconds] of its rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spec_calibrate.acceptance import Outlook, SourceHistory
from spec_calibrate.confidence import calibrated
from spec_calibrate.costs import PLAIN, LiveCosts
from spec_calibrate.curves import Curves
from spec_calibrate.expected import TYPICAL_ACCEPTANCE
from spec_core import Round

_ALLOWANCE = 0.012  # share of the time that trials may cost
_LEAST_ALLOWANCE = 0.004
_SAVED_STEPS = 6.0  # the allowance is saved up to this many plain steps
_OWED_STEPS = 2.0  # and no more than this is owed
_SAVED_AT_FIRST = 3.0
_PROMISE = 1.01  # a trial must promise to be better by this factor
_HOPE = 1.3  # standard deviations of optimism
_PARKED_PACE = 0.35  # how fast the recent past fades in a plain step, against a drafted round
_PLAIN_AFTER = 40  # drafted rounds after which a plain step is measured again
_PLAIN_AFTER_MOST = 640
_PLAIN_IF_DRIFTED = 4
_PLAIN_TRIAL = 2  # plain steps of such a measurement: one fills the pipeline, one counts
_DRIFTED = 0.15  # common drift, as a logarithm, that asks for a new measurement of a plain step
_SELDOM = 0.02  # a source that comes next less often is left out of the reckoning
_FOLLOWS_KEEP = 0.98  # per round, for which source comes after which
_NEW_SEQUENCE = 12.0  # rounds that the recent past fades by when another sequence begins
_DEPTH_STEP = 64  # tokens of context between two looks at the curves
_REVIEW = 4  # rounds between two decisions once there is some experience
_REVIEW_PARKED = 8
_EARLY = 16  # drafted rounds of a sequence in which every round decides


@dataclass(frozen=True, slots=True)
class CapStatus:
    """What the controller does and why, for statistics and health pages.

    Attributes:
        cap: The cap of the next round.
        best_cap: The cap that is expected to pay best; 0 when parked. Another one is used for a
            trial.
        parked: True when it decodes plainly because no cap is expected to pay.
        expected_speedup: Tokens per second over plain decoding of the best cap; 1.0 when parked.
        acceptance: Rates by position of the source in use, each given those before it.
        reason: One sentence.
    """

    cap: int
    best_cap: int
    parked: bool
    expected_speedup: float
    acceptance: tuple[float, ...]
    reason: str


class CapController:
    """A `Cap` that adapts every round.

    Args:
        curves: Measured costs of the pair on this machine.
        max_draft: Largest cap; the curves' without.
        acceptance: Assumed rates by position until rounds teach better; those seen while
            calibrating without.

    Raises:
        ValueError: max_draft is negative, or a rate outside 0..1.
    """

    def __init__(
        self,
        curves: Curves,
        *,
        max_draft: int | None = None,
        acceptance: Sequence[float] | None = None,
    ) -> None:
        self._curves = curves
        self._max_draft = curves.max_draft if max_draft is None else max_draft
        if self._max_draft < 0:
            raise ValueError(f"[controller] max_draft must be >= 0, got {self._max_draft}.")
        rates = tuple(acceptance if acceptance is not None else curves.acceptance)
        if not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError(f"[controller] Acceptance rates must be in 0..1, got {rates}.")
        self._prior = rates or (TYPICAL_ACCEPTANCE,)
        self._costs = LiveCosts()
        self._sources: dict[str, SourceHistory] = {}
        self._source = curves.source
        self._follows: dict[str, dict[str, float]] = {}  # source -> what came next, counts
        self._drafts_s: dict[str, list[float]] = {}
        self._rows_s: list[float] = []  # by cap: verify and overhead at this depth
        self._plain_s = 0.0
        self._depth = 0
        self._go_to(0)
        self._was_plain = False
        self._saved_s = _SAVED_AT_FIRST * self._plain_s
        self._allowance = _ALLOWANCE
        self._since_review = 0
        self._n_drafted = 0  # rounds of this sequence that asked for drafts
        self._since_plain = 0
        self._plain_after = _PLAIN_AFTER
        self._plain_trial = 0
        self._drift_at_plain = 0.0
        self._decision = _Decision(0, 0, 1.0, 0.0)
        self._decide()

    # -- the contract ----------------------------------------------------------------------------

    @property
    def curves(self) -> Curves:
        """The costs it began with."""
        return self._curves

    @property
    def most(self) -> int:
        """The largest cap it may ask for."""
        return self._max_draft

    def next(self) -> int:
        """The cap for the next round."""
        return self._decision.cap

    def observe(self, round_: Round) -> None:
        """Learn from a finished round, then decide about the next one."""
        self._go_to(round_.offset)
        self._since_review += 1
        decision = self._decision
        tried = round_.cap > 0 and round_.cap != decision.best
        # Plain steps are enqueued one ahead, so one may come in before the trial decided on.
        waits = round_.kind == "plain" and 0 < decision.cap != decision.best and not tried
        source = self._source
        if round_.kind == "prefill":
            self._new_sequence()
        elif round_.cap == 0:
            self._learn_plain(round_)
        else:
            self._learn_drafted(round_)
        self._account(round_, tried)
        every = _REVIEW if self._n_drafted > _EARLY else 1
        if decision.best == 0 and self._n_drafted:
            every = _REVIEW_PARKED
        due = self._since_review >= every or source != self._source or self._plain_trial
        if tried or (due and not waits):
            self._decide()

    @property
    def status(self) -> CapStatus:
        """What it does now, and why."""
        decision = self._decision
        history = self._sources.get(self._source)
        rates = history.accepted.estimates(self._max_draft)[0] if history is not None else ()
        return CapStatus(
            cap=decision.cap,
            best_cap=decision.best,
            parked=decision.best == 0,
            expected_speedup=decision.speedup,
            acceptance=tuple(rates),
            reason=self._reason(),
        )

    # -- learning --------------------------------------------------------------------------------

    def _new_sequence(self) -> None:
        self._was_plain = False
        self._n_drafted = 0
        self._since_review = _REVIEW_PARKED
        for history in self._sources.values():
            history.age(_NEW_SEQUENCE)

    def _learn_plain(self, round_: Round) -> None:
        predicted_s = self._plain_s
        if self._was_plain:  # else this step also filled the pipeline
            self._costs.observe(PLAIN, round_.elapsed_s, predicted_s)
            self._drift_at_plain = self._costs.drift
        self._was_plain = True
        self._since_plain = 0
        if self._plain_trial:
            self._plain_trial -= 1
        for history in self._sources.values():
            history.age(_PARKED_PACE)

    def _learn_drafted(self, round_: Round) -> None:
        source, cap = round_.source, round_.cap
        history = self._sources.get(source)
        if history is None:
            history = self._sources[source] = SourceHistory(self._prior)
        history.age()
        confidence = None
        if round_.confidence is not None and self._curves.temperatures:
            confidence = calibrated(round_.confidence, self._curves.temperatures)
        history.add(cap, round_.n_drafted, round_.n_accepted, confidence)
        width = round_.n_drafted + 1
        predicted_s = self._predicted_s(source, cap, width)
        self._costs.observe((source, width), round_.elapsed_s, predicted_s)
        follows = self._follows.setdefault(self._source, {})
        for name in follows:
            follows[name] *= _FOLLOWS_KEEP
        follows[source] = follows.get(source, 0.0) + 1.0
        self._source = source
        self._was_plain = False
        self._since_plain += 1
        self._n_drafted += 1

    def _account(self, round_: Round, tried: bool) -> None:
        """Save the allowance; charge trials with what they lost, credit what they won."""
        most_s = _SAVED_STEPS * self._plain_s
        saved_s = self._saved_s + self._allowance * round_.elapsed_s
        if tried:
            won_s = len(round_.tokens) * self._decision.token_s - round_.elapsed_s
            saved_s += won_s
            grow = 2.0 if won_s > 0 else 0.8
            self._allowance = min(_ALLOWANCE, max(_LEAST_ALLOWANCE, self._allowance * grow))
        self._saved_s = max(-_OWED_STEPS * self._plain_s, min(most_s, saved_s))

    # -- deciding --------------------------------------------------------------------------------

    def _predicted_s(self, source: str, cap: int, width: int) -> float:
        return self._draft_s(source)[cap] + self._rows_s[width - 1]

    def _decide(self) -> None:
        if self._max_draft < 1:
            return
        self._since_review = 0
        mixture = self._mixture()
        rates = self._rates(mixture)
        best = max(range(len(rates)), key=lambda k: (rates[k], -k))
        decision = _Decision(best, best, rates[best] / rates[0], 1.0 / rates[best])
        if self._plain_trial or self._plain_is_due(best, decision.speedup):
            decision.cap = 0
        elif self._saved_s > 0:
            decision.cap = self._trial(best, rates, self._rates(mixture, hopeful_beyond=best))
        self._decision = decision

    def _trial(self, best: int, likely: list[float], hopeful: list[float]) -> int:
        """The cap that may turn out better than the best one, if the allowance covers it."""
        others = [k for k in range(1, len(hopeful)) if k != best]
        cap = max(others, key=hopeful.__getitem__, default=best)
        if cap == best or hopeful[cap] <= _PROMISE * likely[best]:
            return best
        # A round of this cap commits `likely * seconds` tokens; the best cap needs less for them.
        seconds = self._predicted_s(self._source, cap, cap + 1)
        loss_s = seconds * (1.0 - likely[cap] / likely[best])
        return cap if loss_s <= self._saved_s else best

    def _plain_is_due(self, best: int, speedup: float) -> bool:
        """True when speculation should be held against a plain step again."""
        if best == 0:
            return False
        drifted = self._costs.drift - self._drift_at_plain > _DRIFTED
        patience = self._plain_after * max(1.0, (speedup - 1.0) / 0.25)
        if self._since_plain < (_PLAIN_IF_DRIFTED if drifted else patience):
            return False
        self._plain_trial = _PLAIN_TRIAL
        self._drift_at_plain = self._costs.drift
        self._plain_after = (
            _PLAIN_AFTER if drifted else min(2 * self._plain_after, _PLAIN_AFTER_MOST)
        )
        return True

    def _mixture(self) -> list[tuple[str, float, Outlook]]:
        """The sources that may draft next, with their probability and outlook."""
        follows = self._follows.get(self._source) or {self._source: 1.0}
        total = sum(follows.values())
        mixture: list[tuple[str, float, Outlook]] = []
        for name, count in follows.items():
            if count >= _SELDOM * total:
                history = self._sources.get(name) or SourceHistory(self._prior)
                mixture.append((name, count / total, history.outlook(self._max_draft, _HOPE)))
        return mixture

    def _rates(
        self, mixture: list[tuple[str, float, Outlook]], hopeful_beyond: int | None = None
    ) -> list[float]:
        """Tokens per second by cap.

        Args:
            mixture: Who may draft.
            hopeful_beyond: A cap: what only other caps depend on (acceptance at later positions,
                costs of widths not seen lately) is then taken optimistically.
        """
        tokens = [0.0] * (self._max_draft + 1)
        seconds = [0.0] * (self._max_draft + 1)
        for name, share, outlook in mixture:
            expected = outlook.tokens(hopeful_beyond)
            costs = self._seconds(name, outlook.sent, hopeful=hopeful_beyond is not None)
            block = self._curves.blocks.get(name, self._max_draft)
            for k in range(1, self._max_draft + 1):
                given = min(k, block)
                tokens[k] += share * expected[given]
                seconds[k] += share * costs[given]
        tokens[0], seconds[0] = 1.0, self._plain_s * self._costs.plain_factor()
        return [n / s for n, s in zip(tokens, seconds, strict=True)]

    def _seconds(self, source: str, sent: list[float], *, hopeful: bool) -> list[float]:
        """Expected seconds of a round by cap; index 0 is not used.

        A draft may come out shorter than asked for: each width counts with its probability.
        """
        factors = self._costs.factors(source, self._max_draft + 1, hopeful=hopeful)
        drafts, rows = self._draft_s(source), self._rows_s
        seconds = [0.0] * (self._max_draft + 1)
        reach, short_s = 1.0, 0.0  # chance that the draft is this long; seconds of shorter ones
        for cap in range(1, self._max_draft + 1):
            chance = sent[cap - 1]
            if chance < 1.0:
                short_s += reach * (1.0 - chance) * (drafts[cap] + rows[cap - 1]) * factors[cap - 1]
                reach *= chance
            seconds[cap] = short_s + reach * (drafts[cap] + rows[cap]) * factors[cap]
        return seconds

    def _draft_s(self, source: str) -> list[float]:
        costs = self._drafts_s.get(source)
        if costs is None:
            caps = range(self._max_draft + 1)
            costs = self._drafts_s[source] = [self._curves.draft_s(cap, source) for cap in caps]
        return costs

    def _go_to(self, depth: int) -> None:
        """Look the curves up again when the context has grown by a step."""
        if depth // _DEPTH_STEP != self._depth // _DEPTH_STEP or not self._rows_s:
            curves = self._curves
            self._plain_s = curves.plain_s(depth)
            self._rows_s = [
                curves.verify_s(cap + 1, depth) + curves.overhead_s
                for cap in range(self._max_draft + 1)
            ]
        self._depth = depth

    def _reason(self) -> str:
        decision = self._decision
        if self._max_draft < 1:
            return "There is no drafter."
        if decision.cap != decision.best:
            if decision.cap == 0:
                return "A plain step is measured again."
            return f"A cap of {decision.cap} is tried; {decision.best} is the best known."
        if decision.best == 0:
            return "Parked: no cap is expected to beat plain decoding."
        return (
            f"A cap of {decision.best} is expected to give {decision.speedup:.2f} times the "
            "speed of plain decoding."
        )


@dataclass(slots=True)
class _Decision:
    cap: int  # what the next round uses
    best: int  # what is expected to pay most
    speedup: float  # of the best cap over a plain step
    token_s: float  # seconds per token of the best cap
