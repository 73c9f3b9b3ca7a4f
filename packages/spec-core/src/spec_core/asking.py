"""The drafts of rows that share a round: one by one, or together where their drafters can.

Drafters of one kin (see `DraftsTogether`) are asked in one call. What that call does not give, or
gives against the contract, each row's own drafter is asked for, so that a row with a fault fails
alone. Knows nothing about targets.
"""

from collections.abc import Sequence

from spec_core.loop import Run
from spec_core.protocols import DraftAsk, DraftsTogether
from spec_core.step import NO_DRAFTS
from spec_core.types import Draft


def drafts_of(runs: Sequence[Run], caps: Sequence[int]) -> list[Draft | Exception]:
    """Each row's draft, or what went wrong in it; a row takes one key, however it is asked.

    Args:
        runs: Loop states.
        caps: Most drafts of each; 0 asks for none.
    """
    asks = {at: runs[at].ask(cap) for at, cap in enumerate(caps) if cap}
    drafts: list[Draft | Exception] = [NO_DRAFTS] * len(runs)
    joint: dict[int, Draft] = {}
    for group in _by_kin(asks):
        if len(group) > 1:
            joint |= _together(runs, group)
    for at, ask in asks.items():
        drafts[at] = joint[at] if at in joint else _tried(runs[at], ask)
    return drafts


def _by_kin(asks: dict[int, DraftAsk]) -> list[dict[int, DraftAsk]]:
    """The greedy asks whose drafters go together, by row."""
    groups: dict[int, dict[int, DraftAsk]] = {}
    for at, ask in asks.items():
        if ask.sampling.greedy and isinstance(ask.drafter, DraftsTogether):
            kin = ask.drafter.kin
            if kin is not None:
                groups.setdefault(id(kin), {})[at] = ask
    return list(groups.values())


def _together(runs: Sequence[Run], asks: dict[int, DraftAsk]) -> dict[int, Draft]:
    """The sound drafts among those of one call."""
    wanted = list(asks.values())
    first = wanted[0].drafter
    assert isinstance(first, DraftsTogether)
    try:
        given = list(first.draft_together(wanted))
    except Exception:  # perhaps one row's fault: asked alone, only that one fails
        return {}
    if len(given) != len(wanted):
        return {}
    sound: dict[int, Draft] = {}
    for (at, ask), draft in zip(asks.items(), given, strict=True):
        tried = None if draft is None else _tried(runs[at], ask, draft)
        if isinstance(tried, Draft):
            sound[at] = tried
    return sound


def _tried(run: Run, ask: DraftAsk, draft: Draft | None = None) -> Draft | Exception:
    """A draft that was given, else the drafter's own, once it is checked."""
    try:
        return run.checked(ask, ask.alone() if draft is None else draft)
    except Exception as error:
        return error
