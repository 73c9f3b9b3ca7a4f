"""Forwards of a block as one compiled graph, where the host's own work would set the pace.

A GPU that verifies a few rows is done before Python has built the next graph. Here the graph of a
block is traced once for a number of sequences and a capacity of their caches, with the positions as
an input, and replayed from then on. Only for models whose state is plain keys and values, with
kernels that read whole buffers; only after a replay has given the same bits as the model's own
forward on the same block; and only if rounds with replays turn out faster than rounds without,
which they are raced for.

What a block adds is not written inside the graph: MLX's slice update at a position that is an array
starts a thread for each element of the whole buffer on CUDA (0.32). The rows come out, and are
written behind, at a position that is a number.
"""

import functools
import itertools
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from spec_core import TargetOutput
from spec_kernels import Installed, KernelError
from spec_targets.ragged import whole_mask
from spec_targets.replayed import Held, Model, Replay

TRIED_AFTER = 8  # blocks of a kind: fewer would not repay the trace
AGAIN_AFTER = 2  # the same where another width has won its race
RACED = 24  # blocks of about a capacity that have a graph, by turns with and without it
TURN = 4  # blocks: what one leaves on the device weighs on the next
LATER = 512  # blocks after which a race that was lost is run again: something may have disturbed it
KEPT = 128  # kinds of blocks: nine widths at seven capacities, and as many of batches
ROOM = 1024  # buffers hold multiples of it: each capacity is a graph of its own
ROOM_EACH = 512  # the same for each of several sequences: memory that many may never fill
Graph = Callable[..., list[mx.array]]


class Buffers:
    """Stands in for a cache entry while a forward is traced: whole buffers, and how full they are.

    Args:
        keys: (B, HK, C, D), C the capacity.
        values: (B, HK, C, D).
        offset: int32, positions that are filled: no axes for one sequence, (B,) for several.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array) -> None:
        self.keys, self.values, self.offset = keys, values, offset
        self.fresh: tuple[mx.array, ...] = ()  # what the block adds: a kernel reads it from here
        self._n_keys = offset
        self.unread = False  # what was handed out still looks full to whoever does not ask

    @property
    def n_keys(self) -> mx.array:
        """How many keys there are with the fresh ones; a kernel asks for it."""
        self.unread = False
        return self._n_keys

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in (B, HK, T, D); the whole buffers, without them."""
        self._n_keys, self.unread = self.offset + keys.shape[2], True
        self.fresh = (keys, values)
        return self.keys, self.values

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        """The mask as mlx-lm's caches make it, where it is no array."""
        return whole_mask(n, window_size, return_array)


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
    """Rounds with graphs against rounds without, over all widths of capacities like one another."""

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
        if self.lost and self.n >= RACED + LATER:
            self.n, self.lost = 0, False
        self.n += 1
        if self.n <= RACED:
            return (self.n - 1) // TURN % 2 == 0
        if self.own_s and self.replay_s:
            self.lost = _undisturbed(self.replay_s) >= _undisturbed(self.own_s)
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
        kernels: What is installed in it.
    """

    def __init__(self, kernels: Installed) -> None:
        self._kernels = kernels
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()
        self._races: dict[tuple[Any, ...], _Race] = {}
        self._never: set[bool] = set()  # for a lone sequence, for a batch
        self._begun: _Begun | None = None

    def __call__(self, block: mx.array, held: Held, taps: Sequence[int]) -> TargetOutput | None:
        """Ids (T,) or (B, T) through the model; None where its own forward must do it.

        The caches grow by T rows as with the model's own forward.
        """
        begun, self._begun, now = self._begun, None, time.perf_counter()
        if begun is not None and begun.entry() is held.first:
            begun.times.append(now - begun.at)
        rows, capacity = block.shape[-1], self._fit(block, held)
        if capacity is None:
            return None
        shape = (capacity, tuple(taps), self._kernels.epoch, block.shape[:-1])
        kind, race = self._kind((rows, *shape)), self._race(shape)
        if kind.graph is None:
            kind.met += 1
            full = held.n_held + rows == capacity  # says nothing about buffers with room
            least = TRIED_AFTER if race.running else AGAIN_AFTER
            if kind.met < least or kind.refused or race.lost or full:
                return None
            return self._try(kind, block, held, taps)
        running, replays = race.running, race.replays()
        if running:
            times = race.replay_s if replays else race.own_s
            self._begun = _Begun(now, weakref.ref(held.first), times)
        if not replays:
            return None
        return self._replay(kind, block, held, taps)

    def trial(self, block: mx.array, held: Held) -> Replay | None:
        """What replays blocks of this length on these caches from now on; None if nothing can.

        The caches grow by the block's rows in a trial.
        """
        kind = _Kind()
        if self._fit(block, held) is None:
            return None
        self._try(kind, block, held, ())
        return functools.partial(self._replay, kind) if kind.graph is not None else None

    @property
    def rows(self) -> frozenset[int]:
        """Block lengths of one sequence that have a graph in use."""
        kinds = tuple(self._kinds.items())  # another thread may be adding to them
        return frozenset(
            key[0]
            for key, kind in kinds
            if kind.graph and key[-1] == () and not self._race(key[1:]).lost
        )

    def _replay(
        self, kind: _Kind, block: mx.array, held: Held, taps: Sequence[int]
    ) -> TargetOutput:
        assert kind.graph is not None
        arrays = kind.graph(kind.serial, block, *held.inputs())
        self._kernels.count(kind.calls)
        return _take(arrays, len(taps), held, block.shape[-1])

    def _fit(self, block: mx.array, held: Held) -> int | None:
        """Give the caches buffers that a graph may be kept for, with room for the block.

        Returns:
            Positions that they hold, or None if a graph cannot serve these caches.
        """
        rows, several = block.shape[-1], block.ndim > 1
        room = ROOM_EACH if several else ROOM
        if several in self._never:
            return None
        least, have = held.least_keys(self._kernels, rows), held.capacities()
        if least is None or have is None or held.n_held + rows < least:
            return None
        capacity: int = -(-max(held.n_held + rows, *have) // room) * room
        if have != {capacity}:
            held.widen(capacity)
        return capacity

    def _race(self, shape: tuple[Any, ...]) -> _Race:
        """The race of a shape: one for all capacities between two powers of two."""
        capacity, *rest = shape
        return self._races.setdefault((capacity.bit_length(), *rest), _Race())

    def _kind(self, key: tuple[Any, ...]) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > KEPT:
            self._kinds.popitem(last=False)
        return kind

    def _try(
        self, kind: _Kind, block: mx.array, held: Held, taps: Sequence[int]
    ) -> TargetOutput | None:
        """Trace, replay, and compare with the model's own forward, which is what counts here."""
        graph = mx.compile(self._traced(kind, held.model, tuple(taps)))
        try:
            arrays = graph(kind.serial, block, *held.inputs())
        except Exception:  # code that asks the position for its value fails in any way
            self._never.add(block.ndim > 1)
            return None
        try:
            mx.eval(arrays)  # sync: once for a kind of block
        except RuntimeError:  # no memory; a shorter text has it
            kind.refused = True
            return None
        own = held.own(block, taps)
        wanted = [own.logits, *own.taps, *held.newest(block.shape[-1])]
        mx.eval(wanted)  # sync: likewise
        pairs = zip(arrays, wanted, strict=False)
        same = mx.stack([mx.array_equal(a, b, equal_nan=True) for a, b in pairs]).all()
        # sync: the last one of a trial
        kind.refused = len(arrays) != len(wanted) or not bool(same.item())
        if not kind.refused:
            kind.graph = graph
        return TargetOutput(own.logits, own.taps)

    def _traced(self, kind: _Kind, model: Model, taps: tuple[int, ...]) -> Graph:
        # Runs again where MLX traces again, as for a call from another thread. MLX finds a trace by
        # the address of its function and by arguments that are no arrays: the serial number keeps
        # one that has outlived its function from serving the next at that address.
        def run(_: int, block: mx.array, offset: mx.array, *buffers: mx.array) -> list[mx.array]:
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            entries = [Buffers(keys, values, offset) for keys, values in pairs]
            with self._kernels.tracing() as kind.calls:
                done = model(block, entries, taps)
            if any(entry.unread for entry in entries):
                raise KernelError("[compiled] Keys must be read by the kernel, got other code.")
            return [done.logits, *done.taps, *(row for entry in entries for row in entry.fresh)]

        return run


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what disturbs a block makes it longer."""
    return sorted(seconds)[len(seconds) // 4]


def _take(arrays: list[mx.array], n_taps: int, held: Held, rows: int) -> TargetOutput:
    """A replay's outcome; the caches take in what it adds."""
    held.write(arrays[1 + n_taps :], rows)
    return TargetOutput(arrays[0], tuple(arrays[1 : 1 + n_taps]))
