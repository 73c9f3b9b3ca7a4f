"""One drafter for many sequences: a copy per sequence where it can make one, else by turns.

A drafter serves one sequence at a time. One that has `fork` makes a second one on the same weights;
any other is lent out: whoever uses it next first puts the other's context aside.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from spec_core.protocols import Drafter
from spec_core.sampling import Sampling
from spec_core.types import Draft, TargetOutput


@runtime_checkable
class Forkable(Protocol):
    """A drafter that can make another one on the same weights."""

    def fork(self) -> Drafter:
        """A drafter of the same kind and settings with an empty context of its own."""
        ...


class Lender:
    """Gives each sequence a drafter of its own.

    Args:
        drafter: The one that was loaded; nobody else may use it meanwhile.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.user: object | None = None
        self._back: Drafter | None = None

    def lend(self) -> Drafter:
        """A drafter with an empty context."""
        if not isinstance(self.drafter, Forkable):
            return _Lent(self)
        back, self._back = self._back, None
        if back is None:
            return self.drafter.fork()
        back.reset()
        return back

    def take_back(self, drafter: Drafter) -> None:
        """Keep a drafter whose sequence has ended well for the next one: the latest, and only one.

        A small model goes on from where two sequences part. Contexts of drafters with taps are kept
        by whoever keeps the target's state.
        """
        if not drafter.taps and isinstance(self.drafter, Forkable):
            self._back = drafter


class _Lent:
    """Uses the one drafter in turn with others."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._aside: Any = None  # our context while another one uses the drafter

    @property
    def name(self) -> str:
        return self._lender.drafter.name

    @property
    def taps(self) -> tuple[int, ...]:
        return self._lender.drafter.taps

    @property
    def max_draft(self) -> int:
        return self._lender.drafter.max_draft

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        return self._mine().draft(anchor, cap, sampling=sampling, key=key)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        self._mine().observe(tokens, output)

    def reset(self) -> None:
        self._mine().reset()

    def state(self) -> Any:
        return self._mine().state()

    def restore(self, state: Any) -> None:
        self._mine().restore(state)

    def _mine(self) -> Drafter:
        lender = self._lender
        if lender.user is not self:
            other = lender.user
            if isinstance(other, _Lent):
                other._aside = lender.drafter.state()
            lender.user = self
            if self._aside is None:
                lender.drafter.reset()
            else:
                lender.drafter.restore(self._aside)
                self._aside = None
        return lender.drafter
