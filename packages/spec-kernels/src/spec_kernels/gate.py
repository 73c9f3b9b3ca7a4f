"""Decides on the device, once per shape, whether a kernel replaces stock MLX.

Numerics first: against a float32 reference, on ordinary data, on all-negative scales, with
outliers, into poisoned outputs, and for independence of the number of rows. Then a race: chains in
which each output feeds the next input, over rotated weights, arms interleaved, medians. A shape
that fails or loses stays stock. Verdicts are kept in a file, keyed by everything that could change
them. Knows shapes, no models.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_kernels._build import KernelError, revision
from spec_kernels.attention import MAX_QUERIES, RowAttention, row_attention_ops
from spec_kernels.hardware import Device
from spec_kernels.matmul import (
    MAX_ROWS,
    RowMatmul,
    Weight,
    stock_matmul,
    verify_matmul_ops,
)
from spec_kernels.prefill import wide_prefill_ops

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
ATTENTION_TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}
WIN = 1.02  # stock time over kernel time below which a row count stays stock
RACED_ROWS = (1, 2, 4, 6, 8, 9, 12, 16)
RACED_QUERIES = (1, 2, 4, 8, 16)
RACED_KEYS = (512, 2048, 8192)
WIDE_ROWS = (256, 512, 1024, 2048)
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class MatmulShape:
    """A weight of `n` outputs and `k` inputs; 16 bits means not quantised; dtype of the inputs."""

    n: int
    k: int
    bits: int
    group_size: int
    dtype: str

    def __str__(self) -> str:
        kind = "dense" if self.bits == 16 else f"{self.bits}-bit g{self.group_size}"
        return f"{self.k}->{self.n} {kind} {self.dtype.removeprefix('mlx.core.')}"


@dataclass(frozen=True)
class AttentionShape:
    """Heads, heads of the cache, head dimension and dtype."""

    heads: int
    kv_heads: int
    depth: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.depth} {self.dtype}"


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


class Gate:
    """Verdicts for one device.

    Args:
        device: part of the key of every verdict.
        path: JSON file that keeps verdicts between processes, or None.
        race: False takes every shape that is correct, without timing it.
    """

    def __init__(self, device: Device, path: Path | None = None, *, race: bool = True) -> None:
        self._where, self._path, self._race = device.backend, path, race
        mlx_version = metadata.version("mlx")
        self._prefix = f"{device.architecture}|{device.system}|{mlx_version}|{revision()}"
        self._stored: dict[str, Any] = _read(path)

    def matmul(self, shape: MatmulShape) -> Verdict:
        """Verdict for a matmul shape: stored, or measured now and stored."""
        stored = self._get(f"matmul {shape}")
        if stored is not None:
            return Verdict(**{**stored, "rows": frozenset(stored["rows"])})
        verdict = self._measure_matmul(shape)
        self._put(f"matmul {shape}", {**asdict(verdict), "rows": sorted(verdict.rows)})
        return verdict

    def attention(self, shape: AttentionShape) -> AttentionVerdict:
        """Verdict for an attention shape: stored, or measured now and stored."""
        stored = self._get(f"attention {shape}")
        if stored is not None:
            keys = {int(q): n for q, n in stored["min_keys"].items()}
            return AttentionVerdict(**{**stored, "min_keys": keys})
        verdict = self._measure_attention(shape)
        self._put(f"attention {shape}", asdict(verdict))
        return verdict

    def shares(self, together: RowMatmul) -> bool:
        """Whether one launch for several weights gives the bits of one launch each; not stored."""
        singles = [RowMatmul(weight, self._where) for weight in together.weights]
        for rows in (1, MAX_ROWS):
            x = mx.random.normal((rows, together.k), key=mx.random.key(rows)).astype(together.dtype)
            parts = together.launch(x, poison=True)
            for part, single in zip(parts, singles, strict=True):
                if not bool(mx.array_equal(part, single(x))):
                    return False
        return True

    def _key(self, what: str) -> str:
        return f"{self._prefix}|{'race' if self._race else 'check'}|{what}"

    def _get(self, what: str) -> dict[str, Any] | None:
        return self._stored.get(self._key(what))

    def _put(self, what: str, verdict: dict[str, Any]) -> None:
        self._stored[self._key(what)] = verdict
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_text(json.dumps(self._stored, indent=1, sort_keys=True), encoding="utf-8")
            fresh.replace(self._path)

    def _measure_matmul(self, shape: MatmulShape) -> Verdict:
        every = frozenset(range(1, MAX_ROWS + 1))
        try:
            problem = matmul_problem(shape, self._where)
            if problem:
                return Verdict(False, frozenset(), None, problem)
            if not self._race:
                return Verdict(True, every, None, "correct; not raced")
            return race_matmul(shape, self._where)
        except (KernelError, RuntimeError, ValueError) as error:
            return Verdict(False, frozenset(), None, f"refused: {_first_line(error)}")

    def _measure_attention(self, shape: AttentionShape) -> AttentionVerdict:
        try:
            problem = attention_problem(shape, self._where)
            if problem:
                return AttentionVerdict(False, {}, problem)
            if not self._race:
                every = dict.fromkeys(range(1, MAX_QUERIES + 1), 1)
                return AttentionVerdict(True, every, "correct; not raced")
            return race_attention(shape, self._where)
        except (KernelError, RuntimeError, ValueError) as error:
            return AttentionVerdict(False, {}, f"refused: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # a damaged cache only costs a new measurement
        return {}
    return stored if isinstance(stored, dict) else {}


def random_weight(shape: MatmulShape, kind: str = "plain", seed: int = 0) -> Weight:
    """A weight of `shape`: "plain", "negative" (every scale below zero) or "outliers"."""
    dtype = _DTYPES[shape.dtype.removeprefix("mlx.core.")]
    full = mx.random.normal((shape.n, shape.k), key=mx.random.key(seed)) * 0.05
    if kind == "negative":
        full = mx.abs(full) + 0.01
    if kind == "outliers":
        full = mx.where(mx.arange(shape.k) % 61 == 0, full * 100, full)
    full = full.astype(dtype)
    if shape.bits == 16:
        return Weight(full, None, None, 64, 16)
    w, scales, biases = mx.quantize(full, group_size=shape.group_size, bits=shape.bits)
    return Weight(w, scales, biases, shape.group_size, shape.bits)


def relative_error(got: mx.array, want: mx.array) -> float:
    """Largest difference over the largest reference value; NaN if any value is NaN."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return float(mx.abs(got - want).max() / mx.maximum(mx.abs(want).max(), 1e-30))


def matmul_problem(shape: MatmulShape, where: str, **build: Any) -> str | None:
    """What is wrong with the matmul kernel for `shape` on this device, or None.

    Args:
        shape: the shape.
        where: "metal" or "cuda".
        **build: passed on to `RowMatmul`.
    """
    dtype = shape.dtype.removeprefix("mlx.core.")
    for kind in ("plain", "negative", "outliers"):
        weight = random_weight(shape, kind)
        matmul = RowMatmul(weight, where, **build)
        x = mx.random.normal((MAX_ROWS, shape.k), key=mx.random.key(1)).astype(weight.dtype)
        if kind == "outliers":
            x = mx.where(mx.arange(shape.k) % 127 == 3, x * 50, x)
        want = verify_matmul_ops(x.astype(mx.float32), weight)
        full = matmul(x, poison=True)
        for rows in (MAX_ROWS, 9, 8, 1):
            got = matmul(x[:rows], poison=True)
            error = relative_error(got, want[:rows])
            if not error <= TOLERANCE[dtype] * (2 if kind == "outliers" else 1):
                return f"error {error:.1e} on {kind} data at {rows} rows"
            if not bool(mx.array_equal(got, full[:rows])):
                return f"rows are not independent at {rows} rows"
    return None


def attention_problem(shape: AttentionShape, where: str, **build: Any) -> str | None:
    """What is wrong with the attention kernel for `shape` on this device, or None."""
    dtype = _DTYPES[shape.dtype]
    n_keys, scale = 333, shape.depth**-0.5
    q, k, v = (
        mx.random.normal((1, heads, length, shape.depth), key=mx.random.key(i)).astype(dtype)
        for i, (heads, length) in enumerate(
            ((shape.heads, MAX_QUERIES), (shape.kv_heads, n_keys), (shape.kv_heads, n_keys))
        )
    )
    attend = RowAttention(scale, where, **build)
    full = attend(q, k, v, True)
    for queries in (1, 2, 5, 8, MAX_QUERIES):
        part = q[:, :, -queries:]
        want = row_attention_ops(part.astype(mx.float32), k, v, scale=scale, mask="causal")
        got = attend(part, k, v, True)
        error = relative_error(got, want)
        if not error <= ATTENTION_TOLERANCE[shape.dtype]:
            return f"error {error:.1e} at {queries} query positions"
        until = n_keys - queries + 1
        alone = attend(q[:, :, -queries][:, :, None], k[:, :, :until], v[:, :, :until], True)
        if not bool(mx.array_equal(got, full[:, :, -queries:])) or not bool(
            mx.array_equal(alone[:, :, 0], full[:, :, -queries])
        ):
            return f"rows are not independent at {queries} query positions"
    return None


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


def race_matmul(shape: MatmulShape, where: str) -> Verdict:
    """Time the kernel against stock MLX at `RACED_ROWS`, and wide prefill at `WIDE_ROWS`."""
    first = random_weight(shape)
    weights = [first, *(_shifted(first, i) for i in range(1, _copies(first.nbytes)))]
    matmuls = [RowMatmul(weight, where) for weight in weights]
    mx.eval([weight.w for weight in weights])
    speedup: dict[str, float] = {}
    for rows in RACED_ROWS:
        x = mx.random.normal((rows, shape.k)).astype(first.dtype)
        arms = [
            chain(lambda v, i: stock_matmul(v, weights[i % len(weights)]), x, 24),
            chain(lambda v, i: matmuls[i % len(weights)](v), x, 24),
            chain(lambda v, i: v, x, 24),
        ]
        stock, ours, glue = times(arms)
        speedup[str(rows)] = round(max(stock - glue, 1e-9) / max(ours - glue, 1e-9), 3)
    rows = served(RACED_ROWS, [speedup[str(r)] for r in RACED_ROWS])
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
        below = max(m for m in measured if m <= row)
        above = min(m for m in measured if m >= row)
        if wins[below] and wins[above]:
            rows.add(row)
    return frozenset(rows)


def race_attention(shape: AttentionShape, where: str) -> AttentionVerdict:
    """Time the kernel against stock MLX at `RACED_QUERIES` and `RACED_KEYS`."""
    dtype, scale = _DTYPES[shape.dtype], shape.depth**-0.5
    attend = RowAttention(scale, where)
    speedup: dict[str, float] = {}
    for n_keys in RACED_KEYS:
        sets = _copies(4 * shape.kv_heads * n_keys * shape.depth)
        cached = [
            mx.random.normal((2, 1, shape.kv_heads, n_keys + 64, shape.depth)).astype(dtype)
            for _ in range(sets)
        ]
        mx.eval(cached)
        views = [(kv[0][:, :, :n_keys], kv[1][:, :, :n_keys]) for kv in cached]
        for queries in RACED_QUERIES:
            q = mx.random.normal((1, shape.heads, queries, shape.depth)).astype(dtype)
            stock, ours, glue = times(_attention_arms(attend, q, views, scale))
            ratio = max(stock - glue, 1e-9) / max(ours - glue, 1e-9)
            speedup[f"{queries}@{n_keys}"] = round(ratio, 3)
    reason = f"raced: served where at least {WIN:.2f} times stock at that length and beyond"
    return AttentionVerdict(True, min_keys(speedup), reason, speedup)


def _attention_arms(
    attend: RowAttention, q: mx.array, views: Sequence[tuple[mx.array, mx.array]], scale: float
) -> list[Callable[[], mx.array]]:
    causal = q.shape[2] > 1

    def stock(value: mx.array, i: int) -> mx.array:
        k, v = views[i % len(views)]
        mask = "causal" if causal else None
        return mx.fast.scaled_dot_product_attention(value, k, v, scale=scale, mask=mask)

    def ours(value: mx.array, i: int) -> mx.array:
        return attend(value, *views[i % len(views)], causal)

    return [chain(stock, q, 16), chain(ours, q, 16), chain(lambda value, i: value, q, 16)]


def min_keys(speedup: dict[str, float]) -> dict[int, int]:
    """By query positions, the shortest raced length from which the kernel wins everywhere."""
    found: dict[int, int] = {}
    for n_keys in RACED_KEYS:
        deeper = [n for n in RACED_KEYS if n >= n_keys]
        ratios = [min(speedup[f"{queries}@{n}"] for n in deeper) for queries in RACED_QUERIES]
        for queries in served(RACED_QUERIES, ratios):
            found.setdefault(queries, n_keys)
    return found
