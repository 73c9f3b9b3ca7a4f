"""Drafters for speculative decoding on MLX: they propose, the target of spec-core decides."""

from spec_drafters.deepseek_v4 import DeepseekV4Drafter
from spec_drafters.dflash import DFlashDrafter
from spec_drafters.dflash2 import DFlash2Drafter
from spec_drafters.draft_model import DraftModelDrafter
from spec_drafters.dspark import DSparkDrafter
from spec_drafters.eagle3 import Eagle3Drafter
from spec_drafters.hybrid import HybridDrafter
from spec_drafters.load import load_drafter
from spec_drafters.lookup import LookupDrafter
from spec_drafters.pairs import KnownPair, find_pair, known_pairs

__all__ = [
    "DFlash2Drafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "DeepseekV4Drafter",
    "DraftModelDrafter",
    "Eagle3Drafter",
    "HybridDrafter",
    "KnownPair",
    "LookupDrafter",
    "find_pair",
    "known_pairs",
    "load_drafter",
]
