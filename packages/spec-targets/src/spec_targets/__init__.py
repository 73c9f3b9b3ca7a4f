"""mlx-lm models as targets of spec-core: taps, few-row verify and exact rollback."""

from spec_targets.base import MlxTarget, TargetCache
from spec_targets.load import load_target
from spec_targets.tokenizer import HfTokenizer

__all__ = ["HfTokenizer", "MlxTarget", "TargetCache", "load_target"]
