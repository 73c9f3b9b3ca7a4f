"""Plain decoding on CUDA: a replayed forward of one row against the model's own, raced once.

Knows how to fill caches and run both; spec-kernels decides what follows, and keeps it.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_core import TargetOutput
from spec_kernels import Installed
from spec_targets import compiled
from spec_targets.compiled import CompiledForward
from spec_targets.forward import Forward
from spec_targets.replayed import HeldAlone

DEPTHS = (500, 8000)  # positions before the row
REPEATS = 7
Arm = Callable[[], TargetOutput]


def race_single(
    forward: Forward,
    entries: Sequence[Any],
    kernels: Installed,
    model_type: str,
    context_length: int | None,
) -> None:
    """Let single rows be replayed as graphs, with the kernel for their attention, if that wins.

    Nothing changes where it does not win at each depth, or cannot be done. Takes as long as some
    seventy forwards; where the outcome is known already, none.

    Args:
        forward: The watched model.
        entries: A new cache of it.
        kernels: What is installed in it.
        model_type: The checkpoint's, to tell models apart whose shapes are alike.
        context_length: Most positions the model was made for, or None.
    """
    if any(type(entry) is not KVCache for entry in entries):
        return
    most = context_length * 7 // 8 if context_length else max(DEPTHS)
    depths = sorted({min(depth, most) for depth in DEPTHS})
    held = HeldAlone(forward, entries)
    measure = functools.partial(_measure, held, entries, kernels, depths)
    kernels.race_single(f"{model_type} {depths}", measure)


def _measure(
    held: HeldAlone,
    entries: Sequence[Any],
    kernels: Installed,
    depths: Sequence[int],
    use: Callable[[bool], None],
) -> dict[int, dict[str, float]]:
    """Seconds by depth, of the model's own forward and of a replay; empty if there is none."""
    block, found = mx.array([1], mx.int32), {}
    own = functools.partial(held.own, block, ())

    def run(forward: Arm) -> None:
        logits = forward().logits
        for entry in entries:
            entry.offset -= 1
        mx.eval(mx.argmax(logits, axis=-1))  # sync: the forward is what is timed

    try:
        own()  # shows what a layer keeps
        for depth in depths:
            _fill(entries, depth)
            use(True)
            replay = CompiledForward(kernels).trial(block, held)
            use(False)
            if replay is None:
                return {}
            for entry in entries:
                entry.offset = depth
            replayed = functools.partial(replay, block, held, ())
            found[depth] = times({"own": own, "replayed": replayed}, run)
        return found
    finally:
        for entry in entries:
            entry.keys = entry.values = None
        mx.clear_cache()


def times(arms: Mapping[str, Arm], run: Callable[[Arm], None]) -> dict[str, float]:
    """Median seconds of each arm, in turn.

    What a replay adds to the buffers is written by the forward behind it, so that the first forward
    of a turn pays for the other arm: only the second one counts.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(REPEATS + 1):
        for name, arm in arms.items():
            run(arm)
            start = time.perf_counter()
            run(arm)
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _fill(entries: Sequence[Any], n: int) -> None:
    """Random keys and values of `n` positions, in buffers of a graph's capacity."""
    capacity = -(-(n + 1) // compiled.ROOM) * compiled.ROOM
    for i, entry in enumerate(entries):
        arrays = (entry.keys, entry.values)
        entry.keys, entry.values = (
            mx.random.normal(
                (*array.shape[:2], capacity, array.shape[3]),
                dtype=array.dtype,
                key=mx.random.key(2 * i + j),
            )
            for j, array in enumerate(arrays)
        )
        entry.offset = n
    mx.eval([entry.state for entry in entries])
