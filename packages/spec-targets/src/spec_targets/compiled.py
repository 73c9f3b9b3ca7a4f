"""Forwards of a block as one compiled graph, where the host's own work would set the pace.

A GPU that verifies a few rows is done before Python has built the next graph. Here the graph of a
block is traced once for a capacity of the cache, with the position as an input, and replayed from
then on. Only for models whose state is plain keys and values, with kernels that read whole buffers;
only after a replay has given the same bits as the model's own forward on the same block; and only
if rounds with replays turn out faster than rounds without, which they are raced for.
"""

import itertools
import statistics
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_core import TargetOutput
from spec_kernels import Installed, KernelError
from spec_targets.forward import Forward

TRIED_AFTER = 8  # blocks of a kind: fewer would not repay the trace
AGAIN_AFTER = 2  # the same where another width has won its race
RACED = 24  # blocks of a capacity that have a graph, by turns with and without it
TURN = 4  # blocks: what one leaves on the device weighs on the next
KEPT = 64  # kinds of blocks: nine widths at seven capacities
ROOM = 1024  # buffers hold multiples of it: each capacity is a graph of its own
Graph = Callable[..., list[mx.array]]


class Buffers:
    """Stands in for a cache entry while a forward is traced: whole buffers, and how full they are.

    Args:
        keys: (1, HK, C, D), C the capacity.
        values: (1, HK, C, D).
        offset: int32 without axes, positions that are filled.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys, self.values, self.offset = keys, values, offset
        self._n_keys = offset
        self.unread = False  # what was handed out still looks full to whoever does not ask

    @property
    def n_keys(self) -> mx.array:
        """How full the buffers are; a kernel asks for it."""
        self.unread = False
        return self._n_keys

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, HK, T, D) behind what is filled; the whole buffers."""
        self._n_keys, self.unread = self.offset + keys.shape[2], True
        start = self.offset[None]
        self.keys = mx.slice_update(self.keys, keys, start, [2])
        self.values = mx.slice_update(self.values, values, start, [2])
        return self.keys, self.values

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        """The mask as mlx-lm's caches make it, where it is no array."""
        if return_array or window_size is not None:
            raise KernelError("[compiled] Masks must be causal, got a window or an array.")
        return "causal" if n > 1 else None


@dataclass(slots=True)
class _Kind:
    """Blocks of one shape: how often they came, and their graph once there is one."""

    met: int = 0
    refused: bool = False
    graph: Graph | None = None
    serial: int = field(default_factory=itertools.count().__next__)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Race:
    """Rounds with graphs against rounds without, over all widths of one capacity."""

    n: int = 0
    own_s: list[float] = field(default_factory=list)
    replay_s: list[float] = field(default_factory=list)
    lost: bool = False

    @property
    def running(self) -> bool:
        """Whether blocks are still served by turns."""
        return self.n < RACED

    def replays(self) -> bool:
        """Whether a graph serves the block at hand; the first call after the race judges it."""
        if self.running:
            self.n += 1
            return (self.n - 1) // TURN % 2 == 0
        if self.own_s and self.replay_s:
            self.lost = statistics.median(self.replay_s) >= statistics.median(self.own_s)
            self.own_s.clear()
            self.replay_s.clear()
        return not self.lost


@dataclass(frozen=True, slots=True)
class _Begun:
    """The block before this one, during a race: it lasts until the next one begins.

    Knows the cache by its first entry, and does not keep it alive.
    """

    at: float
    entry: weakref.ref[Any]
    times: list[float]


class CompiledForward:
    """Replays the forwards of one model.

    Args:
        forward: The watched model.
        kernels: What is installed in it.
    """

    def __init__(self, forward: Forward, kernels: Installed) -> None:
        self._forward, self._kernels = forward, kernels
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()
        self._races: dict[tuple[Any, ...], _Race] = {}
        self._never = False
        self._begun: _Begun | None = None

    def __call__(
        self, block: mx.array, entries: Sequence[Any], taps: Sequence[int]
    ) -> TargetOutput | None:
        """Ids of shape (T,) through the model; None where its own forward must do it.

        The entries grow by T rows as with the model's own forward.
        """
        begun, self._begun, now = self._begun, None, time.perf_counter()
        if begun is not None and begun.entry() is entries[0]:
            begun.times.append(now - begun.at)
        rows, capacity = block.shape[0], self._fit(block.shape[0], entries)
        if capacity is None:
            return None
        shape = (capacity, tuple(taps), self._kernels.epoch)
        kind, race = self._kind((rows, *shape)), self._races.setdefault(shape, _Race())
        if kind.graph is None:
            kind.met += 1
            full = entries[0].offset + rows == capacity  # says nothing about buffers with room
            least = TRIED_AFTER if race.running else AGAIN_AFTER
            if kind.met < least or kind.refused or race.lost or full:
                return None
            return self._try(kind, block, entries, taps)
        running, replays = race.running, race.replays()
        if running:
            times = race.replay_s if replays else race.own_s
            self._begun = _Begun(now, weakref.ref(entries[0]), times)
        if not replays:
            return None
        arrays = kind.graph(kind.serial, block, *_inputs(entries))
        self._kernels.count(kind.calls)
        return _take(arrays, len(taps), entries, rows)

    @property
    def rows(self) -> frozenset[int]:
        """Block lengths that have a graph in use."""
        kinds = self._kinds.items()
        return frozenset(
            key[0] for key, kind in kinds if kind.graph and not self._races[key[1:]].lost
        )

    def _fit(self, rows: int, entries: Sequence[Any]) -> int | None:
        """Give the entries buffers that a graph may be kept for, with room for the block.

        Returns:
            Positions that they hold, or None if a graph cannot serve these entries.
        """
        if self._never:
            return None
        least = self._kernels.least_keys(rows)
        if least is None or any(type(e) is not KVCache or e.keys is None for e in entries):
            return None
        filled = entries[0].offset + rows
        if filled < least or any(entry.offset + rows != filled for entry in entries):
            return None
        lengths = {entry.keys.shape[2] for entry in entries}
        capacity: int = -(-max(filled, *lengths) // ROOM) * ROOM
        if lengths != {capacity}:
            for entry in entries:
                entry.keys, entry.values = _widened(entry.keys, entry.values, capacity)
        return capacity

    def _kind(self, key: tuple[Any, ...]) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > KEPT:
            self._kinds.popitem(last=False)
        return kind

    def _try(
        self, kind: _Kind, block: mx.array, entries: Sequence[Any], taps: Sequence[int]
    ) -> TargetOutput | None:
        """Trace, replay, and compare with the model's own forward, which is what counts here."""
        graph = mx.compile(self._traced(kind, tuple(taps)))
        try:
            arrays = graph(kind.serial, block, *_inputs(entries))
        except Exception:  # code that asks the position for its value fails in any way
            self._never = True
            return None
        try:
            mx.eval(arrays)  # sync: once for a kind of block
        except RuntimeError:  # no memory for buffers beside those in use; a shorter text has it
            kind.refused = True
            return None
        own = self._forward(block, list(entries), taps)
        mx.eval(own.logits, own.taps)  # sync: likewise
        wanted = [own.logits, *own.taps, *_buffers(entries)]
        pairs = zip(arrays, wanted, strict=False)
        same = mx.stack([mx.array_equal(a, b, equal_nan=True) for a, b in pairs]).all()
        # sync: the last one of a trial
        kind.refused = len(arrays) != len(wanted) or not bool(same.item())
        if not kind.refused:
            kind.graph = graph
        return TargetOutput(own.logits, own.taps)

    def _traced(self, kind: _Kind, taps: tuple[int, ...]) -> Graph:
        # Runs again where MLX traces again, as for a call from another thread. MLX finds a trace by
        # the address of its function and by arguments that are no arrays: the serial number keeps
        # one that has outlived its function from serving the next at that address.
        def run(_: int, block: mx.array, offset: mx.array, *buffers: mx.array) -> list[mx.array]:
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            entries = [Buffers(keys, values, offset) for keys, values in pairs]
            with self._kernels.tracing() as kind.calls:
                done = self._forward(block, entries, taps)
            if any(entry.unread for entry in entries):
                raise KernelError("[compiled] Keys must be read by the kernel, got other code.")
            return [done.logits, *done.taps, *_buffers(entries)]

        return run


def _widened(keys: mx.array, values: mx.array, capacity: int) -> tuple[mx.array, mx.array]:
    n_more = capacity - keys.shape[2]
    room = [(0, 0), (0, 0), (0, n_more), (0, 0)]
    return mx.pad(keys, room), mx.pad(values, room)


def _buffers(entries: Sequence[Any]) -> list[mx.array]:
    return [array for entry in entries for array in (entry.keys, entry.values)]


def _inputs(entries: Sequence[Any]) -> list[mx.array]:
    return [mx.array(entries[0].offset, mx.int32), *_buffers(entries)]


def _take(arrays: list[mx.array], n_taps: int, entries: Sequence[Any], rows: int) -> TargetOutput:
    """A replay's outcome; the entries take their buffers over."""
    buffers = iter(arrays[1 + n_taps :])
    for entry in entries:
        entry.keys, entry.values = next(buffers), next(buffers)
        entry.offset += rows
    return TargetOutput(arrays[0], tuple(arrays[1 : 1 + n_taps]))
