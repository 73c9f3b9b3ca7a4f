"""Drafters for speculative decoding on MLX: they propose, the target of spec-core decides."""

from spec_drafters.lookup import LookupDrafter

__all__ = ["LookupDrafter"]
