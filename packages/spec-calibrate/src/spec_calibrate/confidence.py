"""From a drafter's confidence to a probability of acceptance: one temperature per position.

A confidence c of position i becomes sigmoid(logit(c) / T_i), with T_i fitted to recorded rounds by
maximum likelihood. T > 1 tempers a drafter that is too sure of itself, or too doubtful. Only drafts
whose forerunners were all accepted count: a confidence is meant given those. Knows nothing about
costs and caps.

References:
    Guo et al. 2017, "On Calibration of Modern Neural Networks", arXiv:1706.04599.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spec_calibrate.odds import logit, sigmoid
from spec_core import Round

_EDGE = 1e-4  # confidences are kept this far from 0 and 1
_COOLEST, _HOTTEST = 0.05, 20.0
_SEARCH_STEPS = 40
_PRIOR = 20.0  # samples that the temperature of all positions together counts for
_N_BINS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One draft that the accept rule decided on.

    Attributes:
        position: 0-based place in the draft.
        confidence: What the drafter said, 0..1.
        accepted: What the accept rule said.
    """

    position: int
    confidence: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How far confidences are from what happens.

    Attributes:
        n_samples: Drafts looked at.
        ece_before: Expected calibration error of the confidences as they come.
        ece_after: The same with temperatures, each half of the samples judged by temperatures that
            were fitted to the other half.
        temperatures: Fitted to all samples.
    """

    n_samples: int
    ece_before: float
    ece_after: float
    temperatures: tuple[float, ...]


def samples_of(rounds: Iterable[Round]) -> list[Sample]:
    """The drafts of recorded rounds that have a confidence and were decided on."""
    return [
        Sample(i, round_.confidence[i], i < round_.n_accepted)
        for round_ in rounds
        if round_.confidence is not None
        for i in range(min(round_.n_drafted, round_.n_accepted + 1))
    ]


def tempered(confidence: float, temperature: float) -> float:
    """sigmoid(logit(confidence) / temperature), in 0..1; 0.5 for a confidence that is no number."""
    if not 0.0 <= confidence <= 1.0:
        return 0.5
    return sigmoid(logit(confidence, _EDGE) / temperature)


def calibrated(confidence: Sequence[float], temperatures: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of a whole draft; the last temperature holds for all further positions."""
    last = len(temperatures) - 1
    return tuple(tempered(c, temperatures[min(i, last)]) for i, c in enumerate(confidence))


def fit_temperatures(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Temperatures by position; empty without samples.

    A position with few samples leans on the temperature of all positions together.
    """
    if not samples:
        return ()
    common = _fit([(logit(s.confidence, _EDGE), s.accepted) for s in samples])
    temperatures: list[float] = []
    for position in range(max(s.position for s in samples) + 1):
        here = [(logit(s.confidence, _EDGE), s.accepted) for s in samples if s.position == position]
        share = len(here) / (len(here) + _PRIOR)
        own = _fit(here) if here else common
        temperatures.append(math.exp(share * math.log(own) + (1 - share) * math.log(common)))
    return tuple(temperatures)


def expected_calibration_error(
    probabilities: Sequence[float], accepted: Sequence[bool], n_bins: int = _N_BINS
) -> float:
    """Mean distance between stated probability and share accepted, over bins of equal width.

    Args:
        probabilities: In 0..1.
        accepted: What happened; as many.
        n_bins: Number of bins.

    Raises:
        ValueError: the lengths differ.
    """
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(n_bins)]
    for p, happened in zip(probabilities, accepted, strict=True):
        bins[min(int(p * n_bins), n_bins - 1)].append((p, happened))
    gaps = (abs(sum(p for p, _ in b) - sum(a for _, a in b)) for b in bins if b)
    return sum(gaps) / len(probabilities) if probabilities else 0.0


def evaluate(samples: Sequence[Sample]) -> Evaluation:
    """Expected calibration error before and after, the latter on samples not fitted to."""
    accepted = [s.accepted for s in samples]
    stated = [s.confidence if 0.0 <= s.confidence <= 1.0 else 0.5 for s in samples]
    before = expected_calibration_error(stated, accepted)
    halves = (samples[::2], samples[1::2])
    probabilities: list[float] = []
    happened: list[bool] = []
    for judged, others in (halves, halves[::-1]):
        temperatures = fit_temperatures(others) or (1.0,)
        last = len(temperatures) - 1
        for s in judged:
            probabilities.append(tempered(s.confidence, temperatures[min(s.position, last)]))
            happened.append(s.accepted)
    after = expected_calibration_error(probabilities, happened)
    return Evaluation(len(samples), before, after, fit_temperatures(samples))


def _fit(pairs: Sequence[tuple[float, bool]]) -> float:
    """The temperature of greatest likelihood.

    The negative log-likelihood is convex in 1 / T, so its slope is searched for a change of sign.
    """
    low, high = 1.0 / _HOTTEST, 1.0 / _COOLEST
    for _ in range(_SEARCH_STEPS):
        middle = math.sqrt(low * high)
        slope = sum(x * (sigmoid(x * middle) - accepted) for x, accepted in pairs)
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1.0 / math.sqrt(low * high)
