"""Measured cost curves and a draft cap that adapts, for speculative decoding on MLX."""

from spec_calibrate.controller import CapController, CapStatus
from spec_calibrate.curves import Curve, Curves, knee
from spec_calibrate.expected import Choice, best_cap, expected_tokens, speedups

__all__ = [
    "CapController",
    "CapStatus",
    "Choice",
    "Curve",
    "Curves",
    "best_cap",
    "expected_tokens",
    "knee",
    "speedups",
]
