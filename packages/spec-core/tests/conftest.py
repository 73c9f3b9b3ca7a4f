"""What the tests share: a chi-square test and the target's distribution worked out in NumPy.

Nothing here uses the code under test, so that the two can disagree.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from spec_core import Sampling

Array = np.ndarray
ReferenceProbs = Callable[[Array, Sampling, Sequence[int], Sequence[int]], Array]

# All chi-square tests of this package together raise a false alarm at most this often. The seeds
# are fixed, so a test that has passed keeps passing; the level says how much a pass is worth.
FALSE_ALARM = 1e-6
N_TESTS = 200


def chi_square_tail(x: float, dof: int) -> float:
    """P(X >= x) of a chi-square with `dof` degrees of freedom: the incomplete gamma function."""
    a, x = dof / 2, x / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # series of the lower part
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * scale)
    b, c, d = x + 1 - a, 1e300, 1 / (x + 1 - a)  # continued fraction of the upper part (Lentz)
    fraction = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b)
        c = b + step / c
        fraction *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return fraction * scale


def chi_square_p_value(observed: Array, probs: Array) -> float:
    """p-value of counts against probabilities; cells expected fewer than 5 times are pooled.

    A count in a cell of probability 0 gives 0.0: no sample from `probs` can show it.
    """
    observed, expected = observed.ravel().astype(float), probs.ravel() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    if small.any() and expected[small].sum() > 0:
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    else:
        observed, expected = observed[~small], expected[~small]
    if len(expected) < 2:
        return 1.0
    return chi_square_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def reference_probs(
    logits: Array, settings: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> Array:
    """What the next token must follow, token by token in float64, from the settings' definitions.

    Args:
        logits: Shape (V,).
        settings: Temperature above 0.
        prompt: Ids of the prompt.
        answer: Ids of the answer so far.
    """
    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        if token in prompt or token in answer:
            up = scores[token] > 0
            factor = settings.repetition_penalty
            scores[token] = scores[token] / factor if up else scores[token] * factor
        count = list(answer).count(token)
        scores[token] -= settings.frequency_penalty * count
        scores[token] -= settings.presence_penalty * (count > 0)
    weights = np.exp((np.array(scores) - max(scores)) / settings.temperature)
    ranking = sorted(range(len(scores)), key=lambda token: -weights[token])
    kept = ranking[: settings.top_k] if settings.top_k else ranking
    total, mass, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token] / total
        if settings.top_p < 1 and mass >= settings.top_p:
            break
    kept = [t for t in nucleus if weights[t] >= settings.min_p * weights[ranking[0]]]
    probs = np.zeros(len(scores))
    probs[kept] = weights[kept]
    return probs / probs.sum()


@pytest.fixture(scope="session", name="p_value")
def _p_value() -> Callable[[Array, Array], float]:
    """p-value of counts against probabilities."""
    return chi_square_p_value


@pytest.fixture(scope="session", name="chi_square_tail")
def _chi_square_tail() -> Callable[[float, int], float]:
    """Upper tail of the chi-square distribution."""
    return chi_square_tail


@pytest.fixture(scope="session", name="alpha")
def _alpha() -> float:
    """Level of one chi-square test, so that all of them together keep FALSE_ALARM."""
    return FALSE_ALARM / N_TESTS


@pytest.fixture(scope="session", name="reference")
def _reference() -> ReferenceProbs:
    """The distribution of the next token in NumPy."""
    return reference_probs
