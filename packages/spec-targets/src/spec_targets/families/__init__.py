"""Where each model family keeps its parts, and what else it needs, by mlx-lm module name.

One file per family that needs anything of its own; `stacks` names the parts of the rest.
"""

from spec_targets.families.base import Family
from spec_targets.families.hyper import HYPER
from spec_targets.families.latent import LATENT
from spec_targets.families.layout import Layout, StackFamily
from spec_targets.families.recurrent import RECURRENT
from spec_targets.families.stacks import STACKS

FAMILIES: dict[str, Family] = {**STACKS, **RECURRENT, **LATENT, **HYPER}

__all__ = ["FAMILIES", "Family", "Layout", "StackFamily"]
