"""Drafters for speculative decoding on MLX: they propose, the target of spec-core decides."""

from spec_drafters.dflash import DFlashDrafter
from spec_drafters.dflash2 import DFlash2Drafter
from spec_drafters.dspark import DSparkDrafter
from spec_drafters.lookup import LookupDrafter

__all__ = ["DFlash2Drafter", "DFlashDrafter", "DSparkDrafter", "LookupDrafter"]
