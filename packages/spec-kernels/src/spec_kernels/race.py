"""Kernels against stock MLX on the device: who is faster, from how many rows.

Chains in which each output feeds the next input, over rotated weights, arms in turn, medians:
independent calls overlap, and a single weight stays in a cache. Knows shapes and clocks; checks no
result.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from spec_kernels._build import MAX_ROWS
from spec_kernels.attention import RowAttention
from spec_kernels.matmul import RowMatmul, Weight, stock_matmul
from spec_kernels.numerics import DTYPES, AttentionShape, MatmulShape, random_weight
from spec_kernels.prefill import wide_prefill_ops

WIN = 1.02  # stock time over kernel time below which a row count stays stock
RACED_ROWS = (1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 32)
RACED_QUERIES = (1, 2, 4, 8, 16, 32)
RACED_KEYS = (64, 512, 2048, 8192)
_ATTENTION_STEPS, _ATTENTION_REPEATS = 4, 2
# Lengths a race walks through: two arms, a warm-up and the repeats, for each number of queries.
_GROWTH = 2 * _ATTENTION_STEPS * (_ATTENTION_REPEATS + 1) * len(RACED_QUERIES)
WIDE_ROWS = (256, 512, 1024, 2048)


def raced_rows(most: int) -> tuple[int, ...]:
    """Row counts that are raced where the kernels serve up to `most`."""
    return tuple(rows for rows in RACED_ROWS if rows <= most)


def times(arms: Sequence[Callable[[], mx.array]], repeats: int = 5) -> list[float]:
    """Median seconds of each arm, run in turn `repeats` times after one warm-up each."""
    for arm in arms:
        mx.eval(arm())
    taken: list[list[float]] = [[] for _ in arms]
    for _ in range(repeats):
        for arm, seconds in zip(arms, taken, strict=True):
            start = time.perf_counter()
            mx.eval(arm())
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


@mx.compile
def _glue(x: mx.array, y: mx.array) -> mx.array:
    """The next input: x unchanged in value, but not before y exists."""
    return x + (y.reshape(-1)[:1] * 0).astype(x.dtype)


def chain(
    step: Callable[[mx.array, int], mx.array], x: mx.array, length: int
) -> Callable[[], mx.array]:
    """A run of `length` steps in which every input waits for the output before it."""

    def run() -> mx.array:
        value = x
        for i in range(length):
            value = _glue(value, step(value, i))
        return value

    return run


def _copies(nbytes: int) -> int:
    """Weights to rotate over so that no cache holds them all: 200 MB, at most 24."""
    return max(2, min(24, -(-200_000_000 // max(nbytes, 1))))


@dataclass(frozen=True)
class Verdict:
    """What was found for one matmul shape.

    Attributes:
        correct: whether the numerics passed.
        rows: row counts that the kernel serves.
        wide_from: rows from which dequantising first wins; None if it never does.
        reason: why.
        speedup: stock time over kernel time by rows ("wide 512" for wide prefill).
    """

    correct: bool
    rows: frozenset[int]
    wide_from: int | None
    reason: str
    speedup: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionVerdict:
    """What was found for one attention shape.

    Attributes:
        correct: whether the numerics passed.
        min_keys: by number of query positions, the cache length from which the kernel serves.
        reason: why.
        speedup: stock time over kernel time by "queries@keys".
    """

    correct: bool
    min_keys: dict[int, int]
    reason: str
    speedup: dict[str, float] = field(default_factory=dict)


def race_matmul(shape: MatmulShape, where: str) -> Verdict:
    """Time the kernel against stock MLX at `RACED_ROWS`, and wide prefill at `WIDE_ROWS`."""
    first = random_weight(shape)
    weights = [first, *(_shifted(first, i) for i in range(1, _copies(first.nbytes)))]
    matmuls = [RowMatmul(weight, where) for weight in weights]
    mx.eval([weight.w for weight in weights])
    speedup: dict[str, float] = {}
    measured = raced_rows(MAX_ROWS[where])
    for rows in measured:
        x = mx.random.normal((rows, shape.k)).astype(first.dtype)
        arms = [
            chain(lambda v, i: stock_matmul(v, weights[i % len(weights)]), x, 24),
            chain(lambda v, i: matmuls[i % len(weights)](v), x, 24),
            chain(lambda v, i: v, x, 24),
        ]
        stock, ours, glue = times(arms)
        speedup[str(rows)] = round(max(stock - glue, 1e-9) / max(ours - glue, 1e-9), 3)
    rows = served(measured, [speedup[str(r)] for r in measured])
    wide = _race_wide(shape, weights, speedup) if shape.bits != 16 else None
    reason = f"raced: served where at least {WIN:.2f} times stock"
    return Verdict(True, rows, wide, reason, speedup)


def _shifted(weight: Weight, by: int) -> Weight:
    """Another weight of the same shape, at other addresses."""
    return Weight(
        mx.roll(weight.w, by, 0), weight.scales, weight.biases, weight.group_size, weight.bits
    )


def _race_wide(
    shape: MatmulShape, weights: Sequence[Weight], speedup: dict[str, float]
) -> int | None:
    crossover = None
    for rows in reversed(WIDE_ROWS):
        x = mx.random.normal((rows, shape.k)).astype(weights[0].dtype)
        arms = [
            chain(lambda v, i: stock_matmul(v, weights[i % len(weights)]), x, 4),
            chain(lambda v, i: wide_prefill_ops(v, weights[i % len(weights)]), x, 4),
        ]
        stock, ours = times(arms, 3)
        speedup[f"wide {rows}"] = round(stock / ours, 3)
        if stock < WIN * ours:
            break
        crossover = rows
    return crossover


def served(measured: Sequence[int], speedups: Iterable[float]) -> frozenset[int]:
    """Counts from 1 to the last measured one whose measured neighbours on both sides win."""
    wins = dict(zip(measured, (s >= WIN for s in speedups), strict=True))
    rows = set()
    for row in range(1, measured[-1] + 1):
        below, above = neighbours(measured, row)
        if wins[below] and wins[above]:
            rows.add(row)
    return frozenset(rows)


def neighbours(measured: Sequence[int], row: int) -> tuple[int, int]:
    """The measured counts nearest to `row`: the last one up to it, and the first one from it on."""
    return max(m for m in measured if m <= row), min(m for m in measured if m >= row)


def race_attention(shape: AttentionShape, where: str) -> AttentionVerdict:
    """Time the kernel against stock MLX at `RACED_QUERIES` and `RACED_KEYS`.

    Every step meets a cache of another length, as a growing text does: MLX on CUDA hands blocks to
    cuDNN, which builds a plan for each length, and a race on one length would not see it.
    """
    dtype, scale = DTYPES[shape.dtype], shape.depth**-0.5
    attend = RowAttention(scale, where)
    speedup: dict[str, float] = {}
    for n_keys in RACED_KEYS:
        sets = _copies(4 * shape.kv_heads * n_keys * shape.depth)
        cached = [
            mx.random.normal((2, 1, shape.kv_heads, n_keys + _GROWTH, shape.depth)).astype(dtype)
            for _ in range(sets)
        ]
        mx.eval(cached)
        length = itertools.count(n_keys)  # never the same one twice
        for queries in _raced_queries(where):
            q = mx.random.normal((1, shape.heads, queries, shape.depth)).astype(dtype)
            arms = _attention_arms(attend, q, cached, length, scale)
            stock, ours, glue = times(arms, _ATTENTION_REPEATS)
            ratio = max(stock - glue, 1e-9) / max(ours - glue, 1e-9)
            speedup[f"{queries}@{n_keys}"] = round(ratio, 3)
    reason = f"raced: served where at least {WIN:.2f} times stock at that length and beyond"
    return AttentionVerdict(True, min_keys(speedup, _raced_queries(where)), reason, speedup)


def _attention_arms(
    attend: RowAttention,
    q: mx.array,
    cached: Sequence[mx.array],
    length: Iterator[int],
    scale: float,
) -> list[Callable[[], mx.array]]:
    causal = q.shape[2] > 1

    def view(i: int) -> tuple[mx.array, mx.array]:
        kv, n = cached[i % len(cached)], next(length)
        return kv[0][:, :, :n], kv[1][:, :, :n]

    def stock(value: mx.array, i: int) -> mx.array:
        k, v = view(i)
        mask = "causal" if causal else None
        return mx.fast.scaled_dot_product_attention(value, k, v, scale=scale, mask=mask)

    def ours(value: mx.array, i: int) -> mx.array:
        return attend(value, *view(i), causal)

    def nothing(value: mx.array, i: int) -> mx.array:
        return value

    return [chain(step, q, _ATTENTION_STEPS) for step in (stock, ours, nothing)]


def _raced_queries(where: str) -> tuple[int, ...]:
    return tuple(queries for queries in RACED_QUERIES if queries <= MAX_ROWS[where])


def min_keys(speedup: dict[str, float], raced: Sequence[int] = RACED_QUERIES) -> dict[int, int]:
    """By query positions, the raced length from which the kernel wins everywhere.

    A kernel that wins from the shortest raced length on serves the shorter ones too.
    """
    found: dict[int, int] = {}
    for n_keys in RACED_KEYS:
        deeper = [n for n in RACED_KEYS if n >= n_keys]
        ratios = [min(speedup[f"{queries}@{n}"] for n in deeper) for queries in raced]
        for queries in served(raced, ratios):
            found.setdefault(queries, 1 if n_keys == RACED_KEYS[0] else n_keys)
    return found
