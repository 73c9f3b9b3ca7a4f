"""Probabilities as logarithms of odds, and back."""

import math


def logit(p: float, edge: float) -> float:
    """log(p / (1 - p)) of a probability kept `edge` from 0 and 1; 0 for one that is no number."""
    p = min(max(p, edge), 1.0 - edge) if 0.0 <= p <= 1.0 else 0.5
    return math.log(p / (1.0 - p))


def sigmoid(x: float) -> float:
    """The probability of a logit."""
    return 1.0 / (1.0 + math.exp(-x))
