"""Speculative decoding for MLX: verify loop, accept rule, sampling and the contracts."""

from spec_core.accept import accept_greedy, accept_residual, residual
from spec_core.cap import FixedCap
from spec_core.errors import LoadError, NumericsError, SpecError, StateError
from spec_core.loop import generate
from spec_core.pair import Pair, load_pair
from spec_core.protocols import Cache, Cap, Drafter, Target, Tokenizer
from spec_core.sampling import Sampling, target_probs
from spec_core.stats import Stats, StatsMeter
from spec_core.types import Acceptance, Draft, Round, TargetOutput

__all__ = [
    "Acceptance",
    "Cache",
    "Cap",
    "Draft",
    "Drafter",
    "FixedCap",
    "LoadError",
    "NumericsError",
    "Pair",
    "Round",
    "Sampling",
    "SpecError",
    "StateError",
    "Stats",
    "StatsMeter",
    "Target",
    "TargetOutput",
    "Tokenizer",
    "accept_greedy",
    "accept_residual",
    "generate",
    "load_pair",
    "residual",
    "target_probs",
]
