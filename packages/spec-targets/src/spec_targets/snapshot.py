"""Frozen states of a sequence, from which other sequences can go on: what a prefix cache keeps.

A frozen state holds rows up to some length N. Entries whose rows are positions can go on from any
shorter length as well; a sliding window only where its last W - 1 rows are still held; recurrent
state and compressed groups only from N itself. Rungs, taken on the way to N, hold such entries as
they were there. Freezing copies what is in use, so the live cache and the frozen one never share a
buffer that is written to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from spec_targets.compressed import CompressedCache
from spec_targets.recurrent import RecurrentCache
from spec_targets.window import WindowCache


@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """One cache entry.

    Attributes:
        kind: "rows", "window", "packed", "state", "compressed" or "list".
        arrays: Keys and values (1, heads, n, ..), the newest n rows in temporal order; or the slots
            of a recurrent state; or what a compressed cache holds.
        offset: Absolute position of the next row, N.
        details: Numbers of the kind: (window, slack), (group size, bits), or (window, which of the
            arrays are there).
        parts: Entries of a list.
    """

    kind: str
    arrays: tuple[mx.array, ...]
    offset: int
    details: tuple[int, ...] = ()
    parts: tuple["FrozenEntry", ...] = ()

    def reach(self, n: int) -> int:
        """The greatest length up to `n` that this entry can go on from; 0 for none."""
        if self.kind == "list":
            return min(part.reach(n) for part in self.parts)
        if self.kind in ("state", "compressed"):
            return self.offset if n >= self.offset else 0
        n = min(n, self.offset)
        first = self.offset - self.arrays[0].shape[2]  # absolute position of the oldest row
        if first == 0 or self.kind != "window" or n - (self.details[0] - 1) >= first:
            return n
        return 0

    def thaw(self, n: int) -> Any:
        """A live entry that goes on from length `n`, which `reach` allows."""
        if self.kind == "list":
            return CacheList(*(part.thaw(n) for part in self.parts))
        if self.kind == "state":
            state = RecurrentCache(len(self.arrays))
            state.cache = [mx.contiguous(slot) for slot in self.arrays]
            return state
        if self.kind == "compressed":
            return CompressedCache.holding(self.arrays, self.offset, self.details)
        end = self.arrays[0].shape[2] - (self.offset - n)
        rows = [mx.contiguous(a[:, :, :end]) for a in self.arrays]
        if self.kind == "window":
            return WindowCache.holding(rows[0], rows[1], n, *self.details)
        if self.kind == "packed":
            packed = QuantizedKVCache(*self.details)
            packed.keys, packed.values, packed.offset = tuple(rows[:3]), tuple(rows[3:]), n
            return packed
        entry = KVCache()
        entry.keys, entry.values, entry.offset = rows[0], rows[1], n
        return entry

    def leaves(self) -> Iterator[mx.array]:
        """All arrays, in order."""
        yield from self.arrays
        for part in self.parts:
            yield from part.leaves()

    def layout(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON values."""
        return {
            "kind": self.kind,
            "n_arrays": len(self.arrays),
            "offset": self.offset,
            "details": list(self.details),
            "parts": [part.layout() for part in self.parts],
        }


Rung = tuple[FrozenEntry | None, ...]
"""Entries that cannot go back to a length, frozen there; None for those that can."""


@dataclass(frozen=True, slots=True)
class FrozenCache:
    """A sequence's state at length `offset`.

    Attributes:
        entries: One per cache entry of the model.
        offset: Tokens it stands for.
        rungs: By shorter length, what makes it possible to go on from there.
    """

    entries: tuple[FrozenEntry, ...]
    offset: int
    rungs: Mapping[int, Rung] = field(default_factory=dict)

    def reach(self, n: int) -> int:
        """The greatest length up to `n` that all entries can go on from; 0 is always possible."""
        reached = min([n, self.offset, *(entry.reach(n) for entry in self.entries)])
        own = reached if all(e.reach(reached) == reached for e in self.entries) else 0
        return max([own, *(k for k in self.rungs if k <= min(n, self.offset))])

    def at(self, n: int) -> tuple[FrozenEntry, ...]:
        """The entries to go on with from length `n`, which `reach` allows."""
        if n not in self.rungs:
            return self.entries
        both = zip(self.rungs[n], self.entries, strict=True)
        return tuple(entry if there is None else there for there, entry in both)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All arrays, those of rungs last, in order, for writing them to a file."""
        rungs = [entry for rung in self.rungs.values() for entry in rung if entry is not None]
        return [array for entry in (*self.entries, *rungs) for array in entry.leaves()]

    def layout(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON values."""
        rungs = [[n, [_layout(entry) for entry in rung]] for n, rung in self.rungs.items()]
        return {"entries": [entry.layout() for entry in self.entries], "rungs": rungs}


def _layout(entry: FrozenEntry | None) -> dict[str, Any] | None:
    return entry.layout() if entry is not None else None


def rung_bytes(rung: Rung) -> int:
    """Bytes that a rung holds."""
    return sum(array.nbytes for entry in rung if entry is not None for array in entry.leaves())


def take_rung(entries: Sequence[Any], offset: int) -> Rung | None:
    """What must be kept to come back to this length; None where nothing must, or cannot be."""
    stuck = [entry for entry in entries if type(entry) not in (KVCache, QuantizedKVCache)]
    if not stuck:
        return None
    rung = tuple(
        None if type(entry) in (KVCache, QuantizedKVCache) else freeze_entry(entry, offset)
        for entry in entries
    )
    return rung if sum(entry is not None for entry in rung) == len(stuck) else None


def rebuilt(arrays: Sequence[mx.array], layout: dict[str, Any], offset: int) -> FrozenCache:
    """The frozen cache that `arrays` and `layout` were taken from.

    Raises:
        KeyError, TypeError, StopIteration: they do not belong together.
    """
    left = iter(arrays)
    entries = tuple(_entry(described, left) for described in layout["entries"])
    rungs = {
        int(n): tuple(None if one is None else _entry(one, left) for one in rung)
        for n, rung in layout["rungs"]
    }
    return FrozenCache(entries, offset, rungs)


def _entry(described: dict[str, Any], left: Iterator[mx.array]) -> FrozenEntry:
    own = tuple(next(left) for _ in range(described["n_arrays"]))
    parts = tuple(_entry(part, left) for part in described["parts"])
    details = tuple(int(n) for n in described["details"])
    return FrozenEntry(described["kind"], own, described["offset"], details, parts)


def freeze_entry(entry: Any, offset: int) -> FrozenEntry | None:
    """A frozen copy of a live entry; None for a kind that cannot be frozen, or an empty one."""
    if type(entry) is CacheList:
        frozen = [freeze_entry(one, offset) for one in entry.caches]
        parts = tuple(part for part in frozen if part is not None)
        return FrozenEntry("list", (), offset, (), parts) if len(parts) == len(frozen) else None
    if type(entry) is RecurrentCache:
        slots = [slot for slot in entry.cache if slot is not None]
        if len(slots) < len(entry.cache):
            return None
        return FrozenEntry("state", tuple(mx.contiguous(slot) for slot in slots), offset)
    if type(entry) is CompressedCache:
        if entry.window is None:
            return None
        return FrozenEntry("compressed", *entry.frozen())
    if getattr(entry, "keys", None) is None:
        return None
    if type(entry) is KVCache:
        arrays = _copies((entry.keys, entry.values), entry.offset)
        return FrozenEntry("rows", arrays, entry.offset)
    if type(entry) is QuantizedKVCache:
        arrays = _copies((*entry.keys, *entry.values), entry.offset)  # pyright: ignore[reportOptionalIterable]
        return FrozenEntry("packed", arrays, entry.offset, (entry.group_size, entry.bits))
    if type(entry) is WindowCache:
        arrays = _copies((entry.keys, entry.values), entry.n_held)
        return FrozenEntry("window", arrays, entry.offset, (entry.window, entry.slack))
    return None


def _copies(arrays: Sequence[Any], n_rows: int) -> tuple[mx.array, ...]:
    return tuple(mx.contiguous(array[:, :, :n_rows]) for array in arrays)
