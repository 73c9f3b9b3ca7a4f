"""From a mode or a folder to a drafter: the loader behind `spec_core.load_pair`."""

from pathlib import Path
from typing import Any

from spec_core import Drafter, LoadError, Target, registry
from spec_drafters._checkpoint import open_checkpoint, read_head
from spec_drafters.lookup import LookupDrafter

_WITHOUT_WEIGHTS = ("lookup",)


def load_drafter(
    path: str | Path | None,
    target: Target,
    *,
    mode: str = "auto",
    model: str | None = None,
    **options: Any,
) -> Drafter:
    """Load what drafts for a target.

    Args:
        path: The drafter's checkpoint folder; None lets the mode decide.
        target: The model it drafts for.
        mode: A drafter's name, or "auto": what the checkpoint holds, lookup without one.
        model: What the target was named by.
        options: Passed on to drafters with weights: bits, window, confidence_threshold.

    Raises:
        LoadError: the drafter cannot be run beside this target.
    """
    if path is None:
        if mode in ("auto", *_WITHOUT_WEIGHTS):
            return LookupDrafter()
        raise LoadError(f'[drafters] Mode "{mode}" needs a drafter. Name one with --drafter.')
    if mode in _WITHOUT_WEIGHTS:
        raise LoadError(f'[drafters] Mode "{mode}" has no weights, got a drafter "{path}".')
    if target.tap_refusal is not None:
        raise LoadError(
            f"[drafters] The target's layers cannot be tapped: {target.tap_refusal}. "
            "Lookup stays available: --mode lookup."
        )
    name = read_head(open_checkpoint(path), target).family if mode == "auto" else mode
    if name != "dspark":
        options.pop("confidence_threshold", None)
    return registry.load(registry.DRAFTERS, name).load(path, target, **options)
