"""What a generation needs: a target, a drafter if there is one, a tokenizer if text is wanted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_core import registry
from spec_core.protocols import Drafter, Target, Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with the drafter that proposes for it.

    Attributes:
        target: The model whose output is produced.
        drafter: None decodes plainly.
        tokenizer: None works on ids alone: prompts are ids, rounds carry no text.
    """

    target: Target
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None

    @property
    def max_draft(self) -> int:
        """Most drafts of a round: the drafter's own, cut to what the target verifies at once.

        0 without a drafter.
        """
        most = self.drafter.max_draft if self.drafter is not None else 0
        return most if self.max_block is None else min(most, self.max_block - 1)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that the drafter reads; none without one."""
        return self.drafter.taps if self.drafter is not None else ()

    @property
    def max_block(self) -> int | None:
        """Most rows that the target verifies at once, which it says in a member of this name.

        None where it has no limit (spec-targets has one in exact mode on a GPU).
        """
        return getattr(self.target, "max_block", None)


def load_pair(
    model: str | Path,
    *,
    drafter: str | Path | None = None,
    mode: str = "auto",
    target_options: dict[str, Any] | None = None,
    drafter_options: dict[str, Any] | None = None,
) -> Pair:
    """Load a target, its tokenizer and what drafts for it, with the installed loaders.

    Args:
        model: A checkpoint folder or a hub id.
        drafter: The drafter's folder or hub id; without it the mode decides.
        mode: "baseline" for no drafter, "auto" for the best known one, or another mode of the
            drafter's loader (spec-drafters: `load_drafter`).
        target_options: Passed on to the target's loader (spec-targets: `load_target`).
        drafter_options: Passed on to the drafter's loader (spec-drafters: `load_drafter`).

    Raises:
        LoadError: no loader is installed, or one of them refuses; the message says why.
    """
    load_target = registry.load(registry.LOADERS, "target")
    target, tokenizer = load_target(model, **(target_options or {}))
    if mode == "baseline":
        return Pair(target, None, tokenizer)
    load_drafter = registry.load(registry.LOADERS, "drafter")
    options = {"mode": mode, "model": str(model), **(drafter_options or {})}
    return Pair(target, load_drafter(drafter, target, **options), tokenizer)
