"""Where each model family keeps its embedding, layers, norm and head.

One file per family that needs anything of its own; `dense` serves the rest.
"""

from spec_targets.families.base import Family
from spec_targets.families.dense import DenseFamily
from spec_targets.families.gemma3 import Gemma3Family, Gemma3TextFamily

FAMILIES: dict[str, Family] = {
    "gemma3": Gemma3Family(),
    "gemma3_text": Gemma3TextFamily(),
    "llama": DenseFamily(),
    "mistral": DenseFamily(),
    "phi3": DenseFamily(),
    "qwen2": DenseFamily(),
    "qwen3": DenseFamily(),
}

__all__ = ["FAMILIES", "DenseFamily", "Family"]
