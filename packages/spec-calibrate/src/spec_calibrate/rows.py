"""What a verify costs when several sequences share it: measured when first asked for, then kept.

A wide verify of many rows is another shape for every kernel, so one-row curves say little about
it. Measured are powers of two; sizes between them lie between their costs. Knows nothing about
drafts.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from spec_calibrate.curves import Curve, Curves
from spec_calibrate.keys import Key
from spec_calibrate.samples import doubling
from spec_calibrate.store import Store
from spec_core.host import host_ints

_DEPTH = 64  # tokens of context per row
_MOST_PASSES = 5
_MOST_FIRST = 6  # passes until one takes as long as the one before it

Clock = Callable[[], float]


def measure_rows(
    target: Any,
    n_rows: int,
    most_width: int,
    *,
    taps: Sequence[int] = (),
    budget_s: float = 0.3,
    clock: Clock = time.perf_counter,
) -> Curve:
    """Seconds of a verify of `n_rows` sequences, by the width of their blocks.

    Args:
        target: A `BatchTarget` that does not refuse.
        n_rows: B, at least 2.
        most_width: Widest block, the anchor included.
        taps: Layers that drafters read.
        budget_s: Seconds to spend, about, compiling aside; two widths are timed whatever it takes.
        clock: Seconds, rising.
    """
    limit = target.context_length
    depth = _DEPTH if limit is None else max(1, min(_DEPTH, limit - most_width))
    single = target.make_cache()
    target.prefill([n % target.vocab_size for n in range(1, depth + 1)], single)
    cache = target.join([single] * n_rows)
    widths = doubling(list(range(1, most_width + 1)))
    block = mx.array([[n % target.vocab_size for n in range(most_width)]] * n_rows, mx.int32)

    def once(width: int) -> float:
        start = clock()
        output = target.verify_rows(block[:, :width], cache, taps=taps)
        mx.async_eval(output.taps)
        host_ints(mx.argmax(output.logits, axis=-1).reshape(-1))  # sync: the work to be timed
        target.commit_rows(cache, [0] * n_rows)
        return clock() - start

    # A shape that is new may first have to be compiled, more than once on a GPU: those passes are
    # neither a cost nor a sign of a slow machine.
    spent, rng = 0.0, random.Random(0)
    seconds: dict[int, list[float]] = {}
    for width in widths:
        passes = [once(width), once(width)]
        while not _settled(passes) and len(passes) < _MOST_FIRST:
            passes.append(once(width))
        seconds[width] = [passes[-1]]
        spent += 2 * passes[-1]
        if len(seconds) > 1 and spent > budget_s:  # a slow machine: the slope must do
            break
    while len(seconds[1]) < _MOST_PASSES and spent < budget_s:
        for width in rng.sample(list(seconds), len(seconds)):
            seconds[width].append(once(width))
            spent += seconds[width][-1]
    return Curve(tuple(seconds), tuple(statistics.median_low(t) for t in seconds.values()))


def _settled(passes: list[float]) -> bool:
    return 0.7 < passes[-1] / max(passes[-2], 1e-9) < 1.4


class RowCurves:
    """Costs by batch size, measured lazily on the thread that asks.

    Args:
        target: What verifies.
        most_width: Widest block.
        taps: Layers that drafters read.
        key: What the curves are valid for; without one they are not kept on disk.
        store: Where they are kept; the user's cache folder without.
        budget_s: Seconds per measurement, about.
        clock: Seconds, rising.
    """

    def __init__(
        self,
        target: Any,
        most_width: int,
        *,
        taps: Sequence[int] = (),
        key: Key | None = None,
        store: Store | None = None,
        budget_s: float = 0.3,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._target = target
        self._most_width = most_width
        self._taps = tuple(taps)
        self._key = key
        self._store = store
        self._budget_s = budget_s
        self._clock = clock
        self._curves: dict[int, Curve | None] = {}

    def __call__(self, n_rows: int) -> Curve | None:
        """Seconds of a verify of so many rows, by width; None where it cannot be measured."""
        below = 1 << (n_rows.bit_length() - 1)
        near = self._at(max(below, 2))
        if n_rows <= 2 or below == n_rows or near is None:
            return near
        far = self._at(2 * below)
        if far is None:
            return near
        share = (n_rows - below) / below
        return Curve(near.at, tuple(near(w) + (far(w) - near(w)) * share for w in near.at))

    def _at(self, n_rows: int) -> Curve | None:
        if n_rows not in self._curves:
            self._curves[n_rows] = self._stored(n_rows) or self._measured(n_rows)
        return self._curves[n_rows]

    def _stored(self, n_rows: int) -> Curve | None:
        if self._key is None:
            return None
        found = (self._store or Store()).get(replace(self._key, batch=n_rows)).curves
        if found is None or found.max_draft + 1 < self._most_width:
            return None
        return found.verify[0][1]

    def _measured(self, n_rows: int) -> Curve | None:
        try:
            curve = measure_rows(
                self._target,
                n_rows,
                self._most_width,
                taps=self._taps,
                budget_s=self._budget_s,
                clock=self._clock,
            )
            level = Curve((_DEPTH,), (curve(1),))
            kept = Curves(((_DEPTH, curve),), level, max_draft=self._most_width - 1)
        except (RuntimeError, MemoryError, ValueError):  # no room beside what runs, or no time seen
            return None
        if self._key is not None:
            (self._store or Store()).put(replace(self._key, batch=n_rows), kept)
        return curve
