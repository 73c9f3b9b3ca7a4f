"""How many drafts to verify: a fixed number. The cap that adapts lives in spec-calibrate."""

from dataclasses import dataclass

from spec_core.types import Round


@dataclass(frozen=True, slots=True)
class FixedCap:
    """The same cap every round; 0 is plain decoding.

    Raises:
        ValueError: n is negative.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"[cap] The cap must be >= 0, got {self.n}.")

    @property
    def most(self) -> int:
        """The fixed cap."""
        return self.n

    def next(self) -> int:
        """The fixed cap."""
        return self.n

    def observe(self, round_: Round) -> None:
        """Nothing to learn."""
