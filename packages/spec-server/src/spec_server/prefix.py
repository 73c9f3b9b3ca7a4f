"""States of earlier prompts and answers, found again by the longest run of token ids they share.

An entry is a frozen target cache with the ids it stands for, rungs on the way there for layers that
cannot go back, and drafter contexts at some of its lengths. A hit goes on from the greatest length
where target and drafter can both be restored, contexts shortened where the drafter can; one without
taps is fed the ids again, which costs it no forward of the target. Least recently used entries go
when the budget is full. Used by the engine thread alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import mlx.core as mx

from spec_core import Drafter, TargetOutput
from spec_core.protocols import Shortenable
from spec_server.disk import DiskTier
from spec_server.jobs import common_prefix
from spec_targets.snapshot import rung_bytes

_LEAST = 8  # tokens below which a state is not worth keeping
_MOST_UNWRITTEN = 16  # states that wait to be written; older ones stay in memory alone
RUNG_SHARE = 4  # of the budget, one sequence's rungs take at most this part
_MOST_DRAFTS = 4  # drafter contexts per entry, the longest ones


@dataclass(slots=True, eq=False)
class Entry:
    """One kept state."""

    tokens: tuple[int, ...]
    frozen: Any
    drafts: dict[int, Any]  # length -> drafter state
    nbytes: int
    used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Hit:
    """A live cache to go on from, the length it stands for, and where it was found."""

    cache: Any
    n_tokens: int
    tier: str = "memory"
    rungs: dict[int, Any] = field(default_factory=dict)  # of shorter lengths, and of this one


class Rungs:
    """What one sequence leaves on its way, within a share of the budget: the wider the longer.

    Args:
        target: One with `rung`; any other leaves nothing.
        most_bytes: Where to thin out.
        rungs: Those of a state it goes on from.
    """

    def __init__(self, target: Any, most_bytes: int, rungs: dict[int, Any] | None = None) -> None:
        self._take = getattr(target, "rung", None)
        self._most_bytes = most_bytes
        self.by_length: dict[int, Any] = dict(rungs or {})

    def add(self, cache: Any) -> None:
        """Leave one where a closed cache is now."""
        if self._take is None or self._most_bytes <= 0:
            return
        rung = self._take(cache)
        if rung is None:
            return
        self.by_length[cache.offset] = rung
        while self.by_length and self._nbytes > self._most_bytes:
            lengths = sorted(self.by_length)
            for n in lengths[-2::-2] or lengths:  # every other one; the newest stays
                del self.by_length[n]

    @property
    def _nbytes(self) -> int:
        return sum(rung_bytes(rung) for rung in self.by_length.values())


class PrefixCache:
    """Kept states of one target and drafter.

    Args:
        target: One with `freeze` and `thaw`; any other keeps nothing.
        budget: Most bytes.
        disk: Where states outlive the process.
    """

    def __init__(self, target: Any, budget: int, disk: DiskTier | None = None) -> None:
        self._target = target
        self.budget = budget
        self.disk = disk
        self.entries: list[Entry] = []
        self._unwritten: list[Entry] = []
        self.enabled = budget > 0 and hasattr(target, "freeze") and hasattr(target, "thaw")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(entry.nbytes for entry in list(self.entries))

    def fetch(self, prompt: Sequence[int], drafter: Drafter | None) -> Hit | None:
        """The best state for a prompt, the drafter set to it; None when there is none.

        At least one id of the prompt is left to forward.
        """
        best, best_n, context = self._search(prompt, drafter)
        tier = "memory"
        if self._read_back(prompt, best_n):
            found = self._search(prompt, drafter)
            if found[1] > best_n:
                best, best_n, context = found
                tier = "disk"
        if best is None or best_n < _LEAST:
            return None
        best.used = time.monotonic()
        cache = self._target.thaw(best.frozen, best_n)
        if drafter is not None:
            if context is not None:
                drafter.restore(context)
            else:
                drafter.reset()
                drafter.observe(list(best.tokens[:best_n]), TargetOutput(mx.array([])))
        rungs = {n: rung for n, rung in best.frozen.rungs.items() if n <= best_n}
        return Hit(cache, best_n, tier, rungs)

    def write_one(self) -> None:
        """Write a state that is not on disk yet; for when there is nothing better to do."""
        if self.disk is not None and self._unwritten:
            entry = self._unwritten.pop()
            self.disk.save(entry.tokens, entry.frozen)

    def write_all(self) -> None:
        """Write what is not on disk yet."""
        while self._unwritten:
            self.write_one()

    def _search(
        self, prompt: Sequence[int], drafter: Drafter | None
    ) -> tuple[Entry | None, int, Any]:
        """The entry in memory that goes furthest, how far, and the drafter's context there."""
        best: tuple[Entry | None, int, Any] = None, 0, None
        for entry in self.entries:
            n = min(common_prefix(entry.tokens, prompt), len(prompt) - 1)
            n, context = _restorable(entry, n, drafter)
            if n > best[1]:
                best = entry, n, context
        return best

    def _read_back(self, prompt: Sequence[int], than: int) -> bool:
        """Bring a state from disk that shares clearly more with the prompt; True if one came."""
        if self.disk is None:
            return False
        stored, n = self.disk.best(prompt)
        if stored is None or min(n, len(prompt) - 1) < than + _LEAST:
            return False
        frozen = self.disk.load(stored)
        return frozen is not None and self.put(stored.tokens, frozen, {}) is not None

    def store(
        self,
        tokens: Sequence[int],
        cache: Any,
        drafts: dict[int, Any],
        rungs: dict[int, Any] | None = None,
    ) -> Entry | None:
        """Keep a copy of a closed cache that stands for `tokens`; returns the new entry.

        Args:
            tokens: Its ids.
            cache: Closed.
            drafts: Drafter contexts by length.
            rungs: What the target's `rung` gave, by length.
        """
        if not self.enabled or cache is None or cache.offset != len(tokens):
            return None
        if len(tokens) < _LEAST or any(self._covers(entry, tokens) for entry in self.entries):
            return None
        frozen = self._target.freeze(cache)
        if frozen is None:
            return None
        below = {n: rung for n, rung in (rungs or {}).items() if n <= len(tokens)}
        entry = self.put(tuple(tokens), replace(frozen, rungs=below), drafts)
        if entry is not None and self.disk is not None:
            self._unwritten = [*self._unwritten[-(_MOST_UNWRITTEN - 1) :], entry]
        return entry

    def put(self, tokens: tuple[int, ...], frozen: Any, drafts: dict[int, Any]) -> Entry | None:
        """Keep a frozen state; None when it is larger than the budget."""
        drafts = dict(drafts)
        for entry in list(self.entries):
            n = len(entry.tokens)
            if n <= len(tokens) and tokens[:n] == entry.tokens and frozen.reach(n) == n:
                drafts = entry.drafts | drafts  # the longer state serves in its place
                self.entries.remove(entry)
        longest = sorted(drafts)[-_MOST_DRAFTS:]
        drafts = {n: d for n, d in drafts.items() if n in longest or n in frozen.rungs}
        entry = Entry(tokens, frozen, drafts, frozen.nbytes + state_bytes(drafts))
        if entry.nbytes > self.budget:
            return None
        while self.nbytes + entry.nbytes > self.budget:
            self.entries.remove(min(self.entries, key=lambda e: e.used))
        self.entries.append(entry)
        return entry

    def _covers(self, entry: Entry, tokens: Sequence[int]) -> bool:
        n = len(tokens)
        if len(entry.tokens) < n or list(entry.tokens[:n]) != list(tokens):
            return False
        entry.used = time.monotonic()
        return entry.frozen.reach(n) == n


def _restorable(entry: Entry, n: int, drafter: Drafter | None) -> tuple[int, Any]:
    """The greatest length up to n where target and drafter can both go on, and its context there.

    A drafter without taps needs none: it is fed the ids.
    """
    if drafter is None or not drafter.taps:
        return entry.frozen.reach(n), None
    best: tuple[int, Any] = 0, None
    for length, state in entry.drafts.items():
        k, context = entry.frozen.reach(min(n, length)), state
        if k < length:
            context = None
            if k > 0 and isinstance(drafter, Shortenable):
                context = drafter.shortened(state, k)
        if context is not None and k > best[0]:
            best = k, context
    return best


def state_bytes(state: Any) -> int:
    """Bytes of the arrays inside a drafter's state, each counted once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, mx.array):
            seen[id(value)] = value.nbytes
        elif is_dataclass(value):
            for part in fields(value):
                visit(getattr(value, part.name))
        elif isinstance(value, dict):
            for part in value.values():
                visit(part)
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            for part in value:
                visit(part)

    visit(state)
    return sum(seen.values())
