"""Forwards of a block as one compiled graph, where the host's own work would set the pace.

A GPU that verifies a few rows is done before Python has built the next graph. Here the graph of a
block is traced once for a capacity of the cache, with the position as an input, and replayed from
then on. Only for models whose state is plain keys and values, with kernels that read whole buffers;
only after a replay has given the same bits as the model's own forward on the same block; and only
if rounds with replays turn out faster than rounds without, which they are raced for.
"""

import statistics
import time
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
RACED = 24  # blocks of a kind after the trace, by turns with and without the graph
TURN = 4  # blocks: what one leaves on the device weighs on the next
KEPT = 32  # graphs
ROOM = 1024  # positions by which buffers grow: each capacity is a graph of its own
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
        self.n_keys = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, HK, T, D) behind what is filled; the whole buffers."""
        self.n_keys = self.offset + keys.shape[2]
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
    """Blocks of one shape: how often they came, their graph once there is one, and its race."""

    met: int = 0
    refused: bool = False
    graph: Graph | None = None
    calls: Counter[str] = field(default_factory=Counter)
    raced: int = 0
    own_s: list[float] = field(default_factory=list)
    replay_s: list[float] = field(default_factory=list)

    @property
    def racing(self) -> bool:
        """Whether blocks are still served by turns."""
        return self.raced < RACED

    def replays(self) -> bool:
        """Whether the graph serves the block at hand; the first call after the race judges it."""
        if self.racing:
            self.raced += 1
            return (self.raced - 1) // TURN % 2 == 0
        if self.own_s and self.replay_s:
            if statistics.median(self.replay_s) >= statistics.median(self.own_s):
                self.refused, self.graph = True, None
            self.own_s.clear()
            self.replay_s.clear()
        return self.graph is not None


@dataclass(frozen=True, slots=True)
class _Begun:
    """The block before this one, while its kind is raced: it lasts until the next one begins."""

    at: float
    entries: Sequence[Any]
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
        self._never = False
        self._begun: _Begun | None = None

    def make_room(self, entries: Sequence[Any]) -> None:
        """Let new cache entries grow by steps that are worth a graph."""
        if self._kernels.least_keys(2) is None:
            return
        for entry in entries:
            if type(entry) is KVCache:
                entry.step = ROOM

    def __call__(
        self, block: mx.array, entries: Sequence[Any], taps: Sequence[int]
    ) -> TargetOutput | None:
        """Ids of shape (T,) through the model; None where its own forward must do it.

        The entries grow by T rows as with the model's own forward.
        """
        begun, self._begun, now = self._begun, None, time.perf_counter()
        if begun is not None and begun.entries is entries:
            begun.times.append(now - begun.at)
        rows, capacity = block.shape[0], self._capacity(block.shape[0], entries)
        if capacity is None:
            return None
        kind = self._kind((rows, capacity, tuple(taps), self._kernels.epoch))
        if kind.graph is None:
            kind.met += 1
            if kind.met < TRIED_AFTER or kind.refused:
                return None
            return self._try(kind, block, entries, taps)
        racing, replays = kind.racing, kind.replays()
        if racing:
            self._begun = _Begun(now, entries, kind.replay_s if replays else kind.own_s)
        if not replays:
            return None
        arrays = kind.graph(block, *_inputs(entries))
        self._kernels.count(kind.calls)
        return _take(arrays, len(taps), entries, rows)

    def _capacity(self, rows: int, entries: Sequence[Any]) -> int | None:
        """What every entry's buffers hold, or None if one has no room or is of another kind."""
        if self._never:
            return None
        least = self._kernels.least_keys(rows)
        if least is None or any(type(entry) is not KVCache for entry in entries):
            return None
        first = entries[0]
        if first.keys is None or first.offset + rows < least:
            return None
        capacity: int = first.keys.shape[2]
        alike = all(
            entry.offset == first.offset and entry.keys.shape[2] == capacity for entry in entries
        )
        return capacity if alike and first.offset + rows <= capacity else None

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
        graph = mx.compile(self._traced(tuple(taps)))
        try:
            with self._kernels.tracing() as calls:
                arrays = graph(block, *_inputs(entries))
            mx.eval(arrays)  # sync: once for a kind of block
        except (KernelError, RuntimeError, TypeError, ValueError, AttributeError):
            self._never = True  # code that asks the position for its value cannot be traced
            return None
        own = self._forward(block, list(entries), taps)
        mx.eval(own.logits, own.taps)  # sync: likewise
        pairs = zip(arrays, [own.logits, *own.taps, *_buffers(entries)], strict=True)
        kind.refused = not all(bool(mx.array_equal(a, b, equal_nan=True)) for a, b in pairs)
        if not kind.refused:
            kind.graph, kind.calls = graph, calls
        return TargetOutput(own.logits, own.taps)

    def _traced(self, taps: tuple[int, ...]) -> Graph:
        def run(block: mx.array, offset: mx.array, *buffers: mx.array) -> list[mx.array]:
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            entries = [Buffers(keys, values, offset) for keys, values in pairs]
            done = self._forward(block, entries, taps)
            return [done.logits, *done.taps, *_buffers(entries)]

        return run


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
