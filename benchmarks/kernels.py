"""Kernels against stock MLX on this machine: matmul by shape and rows, attention, whole forwards.

    python benchmarks/kernels.py --only matmul attention forward --out docs/benchmarks

Prints the tables and stores them as JSON, stamped with device, versions, command and date. Every
timed chain feeds each output into the next input and rotates over more weights than a cache holds;
arms run in turn, medians are shown. Several processes may prepare side by side and time one after
the other with `--lock FILE`. Knows nothing about checkpoints: all weights are random.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as kv_cache
from random_model import QWEN3_8B, WARM_UP, random_target

from spec_kernels import install, row_attention_ops, this_device
from spec_kernels.attention import RowAttention
from spec_kernels.matmul import RowMatmul, Weight, stock_matmul, verify_matmul_ops
from spec_kernels.numerics import MatmulShape, random_weight, relative_error
from spec_kernels.race import chain, times
from spec_targets import MlxTarget

ROWS = (1, 2, 4, 8, 9, 16)
WIDTHS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32)
QUERIES = (1, 2, 4, 8, 16)
HEADS, KV_HEADS, DEPTH = 32, 8, 128
Views = Sequence[tuple[mx.array, mx.array]]  # keys and values
MODELS = {
    "Qwen3-8B": (4096, 12288, 4096, 1024),
    "Qwen3-4B": (2560, 9728, 4096, 1024),
    "SmolLM2-135M": (576, 1536, 576, 192),
}


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold `lock`, so that timed parts of several processes do not overlap."""
    if lock is None:
        yield
        return
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def shapes(bits: int) -> dict[str, MatmulShape]:
    """The distinct projections of the benchmarked models, by name."""
    found: dict[tuple[int, int], str] = {}
    for model, (hidden, inner, heads, kv) in MODELS.items():
        parts = {"q": (heads, hidden), "kv": (kv, hidden), "o": (hidden, heads)}
        parts |= {"gate/up": (inner, hidden), "down": (hidden, inner)}
        for part, (n, k) in parts.items():
            found.setdefault((n, k), f"{model} {part}")
    return {name: MatmulShape(n, k, bits, 64, "bfloat16") for (n, k), name in found.items()}


def bandwidth() -> float:
    """Bytes a second of a large copy, read and write both counted."""
    source = mx.zeros((512, 1 << 20), dtype=mx.float32)
    mx.eval(source)
    best = min(times([lambda: source + 1.0], 7))
    return 2 * source.nbytes / best


def rotated(shape: MatmulShape) -> list[Weight]:
    """Weights of one shape, together larger than any cache."""
    first = random_weight(shape)
    count = max(2, min(24, -(-200_000_000 // first.nbytes)))
    return [first, *(random_weight(shape, seed=seed) for seed in range(1, count))]


def time_matmuls(where: str, bits: int, steps: int, lock: Path | None) -> list[dict[str, Any]]:
    """One row per projection: stock and kernel microseconds by rows, bytes floor, error."""
    found = shapes(bits)
    for shape in found.values():  # compile everything before the lock
        matmul = RowMatmul(random_weight(shape), where)
        for rows in (1, 16):
            x = mx.zeros((rows, shape.k), mx.bfloat16)
            mx.eval(matmul(x), stock_matmul(x, matmul.weight))
    with alone(lock):
        rate = bandwidth()
        return [time_matmul(where, name, shape, rate, steps) for name, shape in found.items()]


def time_matmul(
    where: str, name: str, shape: MatmulShape, rate: float, steps: int
) -> dict[str, Any]:
    """Stock MLX and the kernel for one projection, printed as "rows: stock/ours"."""
    weights = rotated(shape)
    ours, count = [RowMatmul(weight, where) for weight in weights], len(weights)
    row: dict[str, Any] = {"shape": f"{name} {shape}", "stock": {}, "ours": {}, "error": 0.0}
    row["floor_us"] = weights[0].nbytes / rate * 1e6
    for rows in ROWS:
        x = mx.random.normal((rows, shape.k)).astype(mx.bfloat16)
        want = verify_matmul_ops(x.astype(mx.float32), weights[0])
        row["error"] = max(row["error"], relative_error(ours[0](x), want))
        arms = [
            chain(lambda v, i: stock_matmul(v, weights[i % count]), x, steps),
            chain(lambda v, i: ours[i % count](v), x, steps),
            chain(lambda v, i: v, x, steps),
        ]
        stock, kernel, glue = (1e6 * seconds / steps for seconds in times(arms))
        row["stock"][rows], row["ours"][rows] = stock - glue, kernel - glue
    cells = " ".join(f"{r}: {row['stock'][r]:.1f}/{row['ours'][r]:.1f}" for r in ROWS)
    print(f"{row['shape']} floor {row['floor_us']:.1f} error {row['error']:.1e} us {cells}")
    return row


def time_attention(where: str, steps: int, lock: Path | None) -> list[dict[str, Any]]:
    """Attention of 32/8 heads of 128 by cache length and query positions."""
    attend = RowAttention(DEPTH**-0.5, where)
    kv = mx.zeros((1, KV_HEADS, 64, DEPTH), mx.bfloat16)
    for queries in QUERIES:  # compile everything before the lock
        q = mx.zeros((1, HEADS, queries, DEPTH), mx.bfloat16)
        mx.eval(attend(q, kv, kv, queries > 1))
    with alone(lock):
        rate = bandwidth()
        return [time_length(attend, n, rate, steps) for n in (512, 2048, 8192, 32768)]


def time_length(attend: RowAttention, n_keys: int, rate: float, steps: int) -> dict[str, Any]:
    """Stock MLX and the kernel at one cache length, printed as "queries: stock/ours"."""
    nbytes = 4 * KV_HEADS * n_keys * DEPTH
    count = max(2, min(24, 200_000_000 // nbytes))
    shape = (2, 1, KV_HEADS, n_keys + 64, DEPTH)
    caches = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(count)]
    views = [(kv[0][:, :, :n_keys], kv[1][:, :, :n_keys]) for kv in caches]
    mx.eval(views)
    row: dict[str, Any] = {"keys": n_keys, "stock": {}, "ours": {}, "error": 0.0}
    row["floor_us"] = nbytes / rate * 1e6
    for queries in QUERIES:
        time_queries(row, attend, queries, views, steps)
    floor, error = row["floor_us"], row["error"]
    cells = " ".join(f"{r}: {row['stock'][r]:.1f}/{row['ours'][r]:.1f}" for r in QUERIES)
    print(f"attention 32/8x128 @{n_keys} floor {floor:.1f} error {error:.1e} us {cells}")
    return row


def time_queries(
    row: dict[str, Any], attend: RowAttention, queries: int, views: Views, steps: int
) -> None:
    """Fill one cell of the attention table."""
    q = mx.random.normal((1, HEADS, queries, DEPTH)).astype(mx.bfloat16)
    scale, causal, n = DEPTH**-0.5, queries > 1, len(views)
    mask = "causal" if causal else None
    want = row_attention_ops(q.astype(mx.float32), *views[0], scale=scale, mask=mask)
    row["error"] = max(row["error"], relative_error(attend(q, *views[0], causal), want))
    sdpa = mx.fast.scaled_dot_product_attention
    arms = [
        chain(lambda v, i: sdpa(v, *views[i % n], scale=scale, mask=mask), q, steps),
        chain(lambda v, i: attend(v, *views[i % n], causal), q, steps),
        chain(lambda v, i: v, q, steps),
    ]
    stock, kernel, glue = (1e6 * seconds / steps for seconds in times(arms))
    row["stock"][queries], row["ours"][queries] = stock - glue, kernel - glue


class Lane:
    """One target on its own cache, as a generation uses it.

    Args:
        target: The target.
        context: Positions to begin with, filled 512 at a time.
    """

    def __init__(self, target: MlxTarget, context: int) -> None:
        self.target, self.cache = target, target.make_cache()
        for start in range(0, context, 512):
            n = min(512, context - start)
            ids = [(7919 * i) % target.vocab_size for i in range(start, start + n)]
            target.prefill(ids, self.cache)

    def block(self, ids: mx.array, keep: int) -> mx.array:
        """Logits of a block (T,) of which `keep` rows stay; not evaluated."""
        logits = self.target.verify(ids, self.cache).logits
        self.target.commit(self.cache, keep)
        return logits

    def forward(self, width: int, keep: int = 0) -> None:
        """One block of `width` rows and its argmax, until it is on the host."""
        mx.eval(mx.argmax(self.block(mx.arange(width), keep), axis=-1))

    def forget(self, n: int) -> None:
        """Drop the newest `n` positions."""
        kv_cache.trim_prompt_cache(self.cache.entries, n)
        self.cache.offset -= n


def forward_curves(
    lanes: dict[str, Lane], widths: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """Milliseconds of one forward and its argmax, until it is on the host, by lane and width.

    The lanes take turns at every repetition, so that both meet the same disturbances.
    """
    curves: dict[str, dict[int, float]] = {name: {} for name in lanes}
    for width in widths:
        seconds: dict[str, list[float]] = {name: [] for name in lanes}
        for turn in range(WARM_UP + repeats):
            for name, lane in lanes.items():
                start = time.perf_counter()
                lane.forward(width)
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
        for name, taken in seconds.items():
            curves[name][width] = statistics.median(taken) * 1e3
    return curves


def growing_ms(lanes: dict[str, Lane], width: int = 8, keep: int = 3, rounds: int = 6) -> dict:
    """Milliseconds of a block of `width` rows of which `keep` stay, as a text grows, by lane."""
    taken: dict[str, list[float]] = {name: [] for name in lanes}
    for turn in range(rounds + 2):
        for name, lane in lanes.items():
            start = time.perf_counter()
            lane.forward(width, keep)
            if turn >= 2:
                taken[name].append(time.perf_counter() - start)
    for lane in lanes.values():
        lane.forget(keep * (rounds + 2))
    return {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}


def decode_ms(lanes: dict[str, Lane], tokens: int = 30, turns: int = 3) -> dict[str, float]:
    """Milliseconds a token of plain greedy decoding, each step enqueued before the last is read."""
    taken: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(turns):
        for name, lane in lanes.items():
            y, start = mx.array([5], mx.int32), 0.0
            for step in range(tokens + 5):
                if step == 5:
                    mx.eval(y)
                    start = time.perf_counter()
                y = mx.argmax(lane.block(y, 1), axis=-1)
                mx.async_eval(y)
            mx.eval(y)
            taken[name].append((time.perf_counter() - start) / tokens * 1e3)
            lane.forget(tokens + 5)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def exact_rounds(lane: Lane, tokens: int) -> dict[str, int]:
    """Greedy decoding one token at a time, then again in blocks with wrong drafts mixed in.

    Every row of every block that follows a right prefix must have the logits' own bits.
    """
    ids, logits = [7], []
    for _ in range(tokens):
        logits.append(lane.block(mx.array([ids[-1]]), 1)[0])
        ids.append(int(mx.argmax(logits[-1])))
    lane.forget(tokens)
    at = differ = compared = 0
    width = 1
    while at < tokens:
        width = min(width % 16 + 3, 16, tokens - at)
        right = max(1, width - at % 3)
        block = ids[at : at + right] + [11] * (width - right)
        rows = lane.block(mx.array(block), right)
        same = [mx.array_equal(rows[i], logits[at + i]) for i in range(right)]
        compared += right
        differ += right - sum(bool(s) for s in same)
        at += right
    lane.forget(tokens)
    return {"rows": compared, "rows that differ": differ}


def time_forwards(
    bits: int,
    contexts: Sequence[int],
    widths: Sequence[int],
    repeats: int,
    mode: str,
    lock: Path | None,
    verdicts: Path | None = None,
) -> list[dict[str, Any]]:
    """Width curves and decoding of stock MLX and of a twin with the kernels, and exactness."""
    stock, twin = random_target(QWEN3_8B, bits), random_target(QWEN3_8B, bits)
    twin.model.update(stock.model.parameters())
    table, heads = [], (HEADS, KV_HEADS, DEPTH)
    with tempfile.TemporaryDirectory() as folder:
        cache = verdicts or Path(folder) / "verdicts.json"
        first = Lane(twin, contexts[0])
        with install(twin.model, exact=True, attention_shape=heads):
            for width in widths:
                first.forward(width)  # all is compiled before the lock
        with (
            alone(lock),
            install(
                twin.model,
                exact=mode == "exact",
                attention_shape=heads,
                cache=cache,
                forward=first.forward,
            ) as installed,
        ):
            twin.use_kernels(installed)
            report = installed.report()
            for context in contexts:
                lanes = {"stock": Lane(stock, context), "ours": Lane(twin, context)}
                row: dict[str, Any] = {"bits": bits, "context": context, "mode": mode}
                row["forward_ms"] = forward_curves(lanes, widths, repeats)
                row["growing_ms"] = growing_ms(lanes)
                row["decode_ms"] = decode_ms(lanes)
                if mode == "exact":
                    row["exact"] = exact_rounds(lanes["ours"], 64)
                row["arms"], row["race_ms"] = report.arms, report.forward_ms
                row["state"] = report.as_dict()["ops"]
                table.append(row)
                show_forward(row)
    return table


def show_forward(row: dict[str, Any]) -> None:
    """Print both curves of one context."""
    print(f"Qwen3-8B {row['bits']}-bit @{row['context']} {row['mode']} {row.get('exact', '')}")
    for arm, curve in row["forward_ms"].items():
        cells = " ".join(f"{w}: {ms:.2f}" for w, ms in curve.items())
        tail = f"growing {row['growing_ms'][arm]:.2f} decode {row['decode_ms'][arm]:.2f}"
        print(f"  {arm:5s} ms {cells} | {tail}", flush=True)


def stamp() -> dict[str, str]:
    """What a result must carry to mean anything."""
    device = this_device()
    return {
        "device": f"{device.name} ({device.architecture})",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm")),
        "command": "python benchmarks/kernels.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description="Kernels against stock MLX on this machine.")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of whole forwards")
    parser.add_argument("--only", choices=("matmul", "attention", "forward"), nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--mode", choices=("auto", "exact"), default="auto")
    parser.add_argument("--lock", type=Path, help="file that serialises the timed parts")
    parser.add_argument("--verdicts", type=Path, help="keeps races of shapes; anew without")
    parser.add_argument("--name", default="kernels", help="of the stored file")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    chosen = parser.parse_args()
    where = this_device().backend
    if where == "cpu":
        sys.exit("[benchmark] The kernels need a GPU, got a CPU. Run this on Metal or CUDA.")
    parts = chosen.only or ["matmul", "attention", "forward"]
    result: dict[str, Any] = {"stamp": stamp()}
    if "matmul" in parts:
        result["matmul"] = [
            row for b in chosen.bits for row in time_matmuls(where, b, chosen.steps, chosen.lock)
        ]
    if "attention" in parts:
        result["attention"] = time_attention(where, chosen.steps, chosen.lock)
    if "forward" in parts:
        result["forward"] = [
            row
            for b in chosen.bits
            for row in time_forwards(
                b,
                chosen.contexts,
                chosen.widths,
                chosen.repeats,
                chosen.mode,
                chosen.lock,
                chosen.verdicts,
            )
        ]
    chosen.out.mkdir(parents=True, exist_ok=True)
    stored = chosen.out / f"{chosen.name}-{where}.json"
    stored.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"stored {stored}")


if __name__ == "__main__":
    main()
