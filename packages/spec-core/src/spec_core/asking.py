"""What drafters of rows that share a round are asked and shown, together where they can.

Drafters of one kin (see `DraftsTogether` and `ObservesTogether`) get one call. What that call does
not give, or gives against the contract, each row's own drafter is asked for, so that a row with a
fault fails alone. Knows nothing about targets.
"""

from collections.abc import Sequence
from typing import TypeVar

from spec_core.loop import Run
from spec_core.protocols import DraftAsk, Drafter, DraftsTogether, Observation, ObservesTogether
from spec_core.step import NO_DRAFTS
from spec_core.types import Draft

_Call = TypeVar("_Call", DraftAsk, Observation)


def drafts_of(runs: Sequence[Run], caps: Sequence[int]) -> list[Draft | Exception]:
    """Each row's draft, or what went wrong in it; a row takes one key, however it is asked.

    Args:
        runs: Loop states.
        caps: Most drafts of each; 0 asks for none.
    """
    drafts: list[Draft | Exception] = [NO_DRAFTS] * len(runs)
    asked = [at for at, cap in enumerate(caps) if cap]
    failed = _catch_up(runs, asked)
    for at, error in failed.items():
        drafts[at] = error
    asks = {at: runs[at].ask(caps[at]) for at in asked if at not in failed}
    joint: dict[int, Draft] = {}
    for group in _by_kin({at: ask for at, ask in asks.items() if ask.sampling.greedy}):
        joint |= _together(runs, group)
    for at, ask in asks.items():
        drafts[at] = joint[at] if at in joint else _tried(runs[at], ask)
    return drafts


def observed_together(shown: dict[int, Observation]) -> set[int]:
    """Show drafters of one kin their rows in one call.

    Args:
        shown: What greedy rows kept, by row.

    Returns:
        The rows whose drafters have taken theirs in.
    """
    done: set[int] = set()
    for group in _by_kin(shown):
        first = next(iter(group.values())).drafter
        if isinstance(first, ObservesTogether):
            try:
                first.observe_together(list(group.values()))
            except Exception:  # perhaps one row's fault: shown alone, only that one fails
                continue
            done |= group.keys()
    return done


def _catch_up(runs: Sequence[Run], asked: Sequence[int]) -> dict[int, Exception]:
    """Show drafters that are to be asked what was held back; what went wrong, by row."""
    waiting = {at: kept for at in asked if (kept := runs[at].unseen.take()) is not None}
    seen = observed_together(waiting)
    failed: dict[int, Exception] = {}
    for at, kept in waiting.items():
        if at not in seen:
            try:
                kept.alone()
            except Exception as error:
                failed[at] = error
    return failed


def _by_kin(calls: dict[int, _Call]) -> list[dict[int, _Call]]:
    """Those of at least two drafters of one kin, by row."""
    groups: list[tuple[object, dict[int, _Call]]] = []
    for at, call in calls.items():
        kin = _kin_of(call.drafter)
        if kin is None:
            continue
        group = next((group for known, group in groups if known is kin), None)
        if group is None:
            group = {}
            groups.append((kin, group))
        group[at] = call
    return [group for _, group in groups if len(group) > 1]


def _kin_of(drafter: Drafter) -> object | None:
    try:
        together = isinstance(drafter, DraftsTogether | ObservesTogether)
        return drafter.kin if together else None
    except Exception:  # one drafter's fault
        return None


def _together(runs: Sequence[Run], asks: dict[int, DraftAsk]) -> dict[int, Draft]:
    """The sound drafts among those of one call."""
    wanted = list(asks.values())
    first = wanted[0].drafter
    if not isinstance(first, DraftsTogether):
        return {}
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
