"""Forwards over whole buffers: what they read and write of caches, one sequence or several.

Keys and values lie in buffers with room for more. Attention reads them whole and is told how full
they are. What a graph adds comes out of it as rows, which are written behind afterwards, each kind
of cache in its own way. Knows nothing about how graphs are made or kept.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_core import TargetOutput
from spec_kernels import Installed, KernelError
from spec_targets.batching import BatchCache, can_read_whole, power_of_two, verify_rows
from spec_targets.forward import Forward
from spec_targets.ragged import Places

Model = Callable[[mx.array, list[Any], Sequence[int]], TargetOutput]
Replay = Callable[[mx.array, "Held", Sequence[int]], TargetOutput | None]


class Held(Protocol):
    """Caches of one block."""

    @property
    def first(self) -> Any:
        """The first cache entry: these caches are the same as before as long as it is."""
        ...

    @property
    def n_held(self) -> int:
        """Positions of the longest sequence."""
        ...

    def least_keys(self, kernels: Installed, n_new: int) -> int | None:
        """From how many keys the kernels read such buffers whole, or None."""
        ...

    def capacities(self) -> set[int] | None:
        """Positions that the buffers have room for; None for caches that no graph can read."""
        ...

    def widen(self, capacity: int) -> None:
        """Give every buffer room for `capacity` positions."""
        ...

    def inputs(self) -> list[mx.array]:
        """Where the new positions begin, int32, then keys and values of each layer."""
        ...

    @property
    def model(self) -> Model:
        """The model, to be run on stand-ins for the entries; does not keep these caches alive."""
        ...

    def own(self, block: mx.array, taps: Sequence[int]) -> TargetOutput:
        """The model's own forward: the caches grow."""
        ...

    def newest(self, n_new: int) -> list[mx.array]:
        """Keys and values, (B, HK, T, D) each, that the own forward has just written."""
        ...

    def write(self, rows: Sequence[mx.array], n_new: int) -> None:
        """Grow by keys and values (B, HK, T, D) of each layer."""
        ...


class HeldAlone:
    """The caches of one sequence, block ids of shape (T,).

    Args:
        forward: The watched model.
        entries: Its cache entries.
    """

    def __init__(self, forward: Forward, entries: Sequence[Any]) -> None:
        self._forward, self._entries = forward, list(entries)

    @property
    def first(self) -> Any:
        """See `Held`."""
        return self._entries[0]

    @property
    def n_held(self) -> int:
        """See `Held`."""
        return self._entries[0].offset

    def least_keys(self, kernels: Installed, n_new: int) -> int | None:
        """See `Held`."""
        return kernels.least_keys(n_new)

    def capacities(self) -> set[int] | None:
        """See `Held`."""
        entries = self._entries
        if any(type(e) is not KVCache or e.keys is None for e in entries):
            return None
        if any(entry.offset != entries[0].offset for entry in entries):
            return None
        return {entry.keys.shape[2] for entry in entries}

    def widen(self, capacity: int) -> None:
        """See `Held`."""
        for entry in self._entries:
            room = [(0, 0), (0, 0), (0, capacity - entry.keys.shape[2]), (0, 0)]
            entry.keys, entry.values = mx.pad(entry.keys, room), mx.pad(entry.values, room)

    def inputs(self) -> list[mx.array]:
        """See `Held`; the beginning has no axes."""
        return [mx.array(self.n_held, mx.int32), *self._buffers()]

    @property
    def model(self) -> Model:
        """See `Held`."""
        return functools.partial(_alone, self._forward)

    def own(self, block: mx.array, taps: Sequence[int]) -> TargetOutput:
        """See `Held`."""
        return self.model(block, self._entries, taps)

    def newest(self, n_new: int) -> list[mx.array]:
        """See `Held`."""
        end = self.n_held
        return [array[..., end - n_new : end, :] for array in self._buffers()]

    def write(self, rows: Sequence[mx.array], n_new: int) -> None:
        """See `Held`."""
        at = iter(rows)
        for entry in self._entries:
            begin, end = entry.offset, entry.offset + n_new
            entry.keys[..., begin:end, :] = next(at)
            entry.values[..., begin:end, :] = next(at)
            entry.offset = end

    def _buffers(self) -> list[mx.array]:
        return [array for entry in self._entries for array in (entry.keys, entry.values)]


class HeldTogether:
    """The caches of several sequences, block ids of shape (B, T).

    Args:
        forward: The watched model.
        cache: A closed batch cache that `can_read_whole`.
    """

    def __init__(self, forward: Forward, cache: BatchCache) -> None:
        self._forward, self._cache = forward, cache
        self._entries: list[Any] = cache.entries

    @property
    def first(self) -> Any:
        """See `Held`."""
        return self._entries[0]

    @property
    def n_held(self) -> int:
        """See `Held`."""
        return max(self._cache.held)

    def least_keys(self, kernels: Installed, n_new: int) -> int | None:
        """See `Held`."""
        return 1 if kernels.reads_ragged(n_new) else None

    def capacities(self) -> set[int] | None:
        """See `Held`."""
        if any(entry.used != self._cache.held for entry in self._entries):
            return None
        return {entry.capacity for entry in self._entries}

    def widen(self, capacity: int) -> None:
        """See `Held`."""
        for entry in self._entries:
            entry.widen(capacity)

    def inputs(self) -> list[mx.array]:
        """See `Held`; the beginnings are (B,)."""
        begin = mx.array(self._cache.held, mx.int32)
        return [begin, *self._buffers()]

    @property
    def model(self) -> Model:
        """See `Held`."""
        return functools.partial(_together, self._forward)

    def own(self, block: mx.array, taps: Sequence[int]) -> TargetOutput:
        """See `Held`; leaves the blocks open."""
        return verify_rows(self._forward.rows, block, self._cache, taps, whole=True)

    def newest(self, n_new: int) -> list[mx.array]:
        """See `Held`."""
        index = Places(n_new, self._cache.held).columns(self._cache.held)[:, None, :, None]
        return [mx.take_along_axis(array, index, axis=2) for array in self._buffers()]

    def write(self, rows: Sequence[mx.array], n_new: int) -> None:
        """See `Held`; leaves the blocks open."""
        places, at = Places(n_new, self._cache.held, whole=True), iter(rows)
        for entry in self._entries:
            entry.prepare(places)
            entry.write([next(at), next(at)])
        self._cache.n_open = n_new

    def _buffers(self) -> list[mx.array]:
        return [array for entry in self._entries for array in entry.buffers]


class WholeRows:
    """Verifies of several sequences whose attention reads whole buffers.

    Args:
        forward: The watched model.
        kernels: What is installed in it.
        replay: Replays a block's forward where it can.

    Attributes:
        serves: False once a layer turned out to read keys by itself.
    """

    def __init__(self, forward: Forward, kernels: Installed, replay: Replay | None) -> None:
        self._forward, self._kernels, self._replay = forward, kernels, replay
        self.serves = True

    def __call__(
        self, blocks: mx.array, cache: BatchCache, taps: Sequence[int]
    ) -> TargetOutput | None:
        """Ids (B, T) through the model, left open; None where buffers must be cut."""
        n_rows = blocks.shape[1]
        served = self.serves and self._kernels.reads_ragged(n_rows)
        if not served or not can_read_whole(cache):
            return None
        blocks = self._padded(blocks)
        was_open, output = cache.is_open, None
        try:
            if self._replay is not None and not was_open:
                output = self._replay(blocks, HeldTogether(self._forward, cache), taps)
            if output is None:
                output = verify_rows(self._forward.rows, blocks, cache, taps, whole=True)
            if blocks.shape[1] == n_rows:
                return output
            return TargetOutput(
                output.logits[:, :n_rows], tuple(t[:, :n_rows] for t in output.taps)
            )
        except KernelError:
            self.serves = False
            return None
        except BaseException:
            if not was_open:  # a trial that broke off after its forward had opened the blocks
                cache.n_open = 0
            raise

    @property
    def pads(self) -> bool:
        """Whether each number of sequences is another shape to the device."""
        return self.serves and self._kernels.reads_ragged(1)

    def _padded(self, blocks: mx.array) -> mx.array:
        """Blocks of one of few widths, as each shape costs the device a start of its own.

        What lies behind a block's end is never kept.
        """
        n_rows = blocks.shape[1]
        wide = power_of_two(n_rows)
        if wide == n_rows or not self._kernels.reads_ragged(wide):
            return blocks
        return mx.pad(blocks, [(0, 0), (0, wide - n_rows)])


def _alone(
    forward: Forward, block: mx.array, entries: list[Any], taps: Sequence[int]
) -> TargetOutput:
    done = forward(block, entries, taps)
    return TargetOutput(done.logits, done.taps)


def _together(
    forward: Forward, block: mx.array, entries: list[Any], taps: Sequence[int]
) -> TargetOutput:
    return TargetOutput(*forward.rows(block, entries, taps))
