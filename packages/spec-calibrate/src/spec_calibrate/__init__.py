"""Measured cost curves and a draft cap that adapts, for speculative decoding on MLX."""

from spec_calibrate.calibration import Calibration, calibrate, load_or_measure
from spec_calibrate.controller import CapController, CapStatus
from spec_calibrate.curves import Curve, Curves, knee
from spec_calibrate.expected import Choice, best_cap, expected_tokens, speedups
from spec_calibrate.keys import Key, key_for, model_identity
from spec_calibrate.measure import measure
from spec_calibrate.rows import RowCurves, measure_rows
from spec_calibrate.store import Store

__all__ = [
    "Calibration",
    "CapController",
    "CapStatus",
    "Choice",
    "Curve",
    "Curves",
    "Key",
    "RowCurves",
    "Store",
    "best_cap",
    "calibrate",
    "expected_tokens",
    "key_for",
    "knee",
    "load_or_measure",
    "measure",
    "measure_rows",
    "model_identity",
    "speedups",
]
