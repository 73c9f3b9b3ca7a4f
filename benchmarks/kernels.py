"""Kernels against stock MLX on this machine: matmul by shape and rows, attention, whole forwards.

    python benchmarks/kernels.py [--quick] [--out docs/benchmarks]

Prints the tables and stores them, stamped with device, versions, command and date, as one Markdown
and one JSON file. Every timed chain feeds each output into the next input and rotates over more
weights than a cache holds; arms run in turn, medians are shown. Knows nothing about checkpoints:
all weights are random.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as kv_cache
from mlx_lm.models import qwen3

from spec_kernels import install, row_attention_ops, this_device
from spec_kernels.attention import RowAttention
from spec_kernels.gate import (
    AttentionShape,
    MatmulShape,
    chain,
    random_weight,
    relative_error,
    times,
)
from spec_kernels.matmul import RowMatmul, Weight, stock_matmul, verify_matmul_ops

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
WIDTHS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32)
MODELS = {
    "Qwen3-8B": (4096, 12288, 4096, 1024),
    "Qwen3-4B": (2560, 9728, 4096, 1024),
    "SmolLM2-135M": (576, 1536, 576, 192),
}


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


def time_matmuls(where: str, bits: int, rate: float, steps: int) -> list[dict[str, Any]]:
    """One row per projection: stock and kernel microseconds by rows, bytes floor, error."""
    table = []
    for name, shape in shapes(bits).items():
        weights = rotated(shape)
        ours = [RowMatmul(weight, where) for weight in weights]
        row: dict[str, Any] = {"shape": f"{name} {shape}", "stock": {}, "ours": {}, "error": 0.0}
        row["floor_us"] = weights[0].nbytes / rate * 1e6
        for rows in ROWS:
            x = mx.random.normal((rows, shape.k)).astype(mx.bfloat16)
            want = verify_matmul_ops(x.astype(mx.float32), weights[0])
            row["error"] = max(row["error"], relative_error(ours[0](x), want))
            count = len(weights)
            arms = [
                chain(lambda v, i, w=weights, c=count: stock_matmul(v, w[i % c]), x, steps),
                chain(lambda v, i, w=ours, c=count: w[i % c](v), x, steps),
                chain(lambda v, i: v, x, steps),
            ]
            stock, kernel, glue = (1e6 * seconds / steps for seconds in times(arms))
            row["stock"][rows], row["ours"][rows] = stock - glue, kernel - glue
        table.append(row)
        show_matmul(row)
    return table


def show_matmul(row: dict[str, Any]) -> None:
    """Print one line of the matmul table."""
    cells = " ".join(f"{r}: {row['stock'][r]:.1f}/{row['ours'][r]:.1f}" for r in ROWS)
    print(
        f"{row['shape']}  floor {row['floor_us']:.1f}  error {row['error']:.1e}  {cells}",
        flush=True,
    )


def time_attention(where: str, rate: float, steps: int) -> list[dict[str, Any]]:
    """Qwen3-8B's attention (32/8 heads of 128) by cache length and query positions."""
    table = []
    shape = AttentionShape(32, 8, 128, "bfloat16")
    attend = RowAttention(shape.depth**-0.5, where)
    for n_keys in (512, 2048, 8192, 32768):
        sets = max(2, min(24, 200_000_000 // (4 * 8 * n_keys * 128)))
        kv = [
            mx.random.normal((2, 1, 8, n_keys + 64, 128)).astype(mx.bfloat16) for _ in range(sets)
        ]
        views = [(pair[0][:, :, :n_keys], pair[1][:, :, :n_keys]) for pair in kv]
        mx.eval(views)
        row: dict[str, Any] = {"keys": n_keys, "stock": {}, "ours": {}, "error": 0.0}
        row["floor_us"] = 4 * 8 * n_keys * 128 / rate * 1e6
        for queries in (1, 2, 4, 8, 16):
            q = mx.random.normal((1, 32, queries, 128)).astype(mx.bfloat16)
            time_one_attention(row, attend, q, views, steps)
        table.append(row)
        cells = " ".join(f"{r}: {row['stock'][r]:.1f}/{row['ours'][r]:.1f}" for r in row["ours"])
        floor, error = row["floor_us"], row["error"]
        print(f"attention 32/8x128 @{n_keys} floor {floor:.1f} error {error:.1e} {cells}")
    return table


def time_one_attention(
    row: dict[str, Any], attend: RowAttention, q: mx.array, views: Sequence, steps: int
) -> None:
    """Fill one cell of the attention table."""
    scale, causal, n = 128**-0.5, q.shape[2] > 1, len(views)
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
    row["stock"][q.shape[2]], row["ours"][q.shape[2]] = stock - glue, kernel - glue


def qwen3_8b(bits: int) -> nn.Module:
    """Qwen3-8B with random weights, quantised to `bits` in groups of 64 unless 16."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=4096,
        num_hidden_layers=36,
        intermediate_size=12288,
        num_attention_heads=32,
        rms_norm_eps=1e-6,
        vocab_size=151936,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        rope_theta=1e6,
        head_dim=128,
        tie_word_embeddings=False,
    )
    model = qwen3.Model(args)
    model.set_dtype(mx.bfloat16)
    if bits != 16:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def forward_curve(
    model: nn.Module, context: int, repeats: int, after: Callable[[], None] | None = None
) -> dict[int, float]:
    """Milliseconds of one forward and its argmax by width, on a cache of `context` positions."""
    caches = kv_cache.make_prompt_cache(model)
    for start in range(0, context, 512):
        ids = mx.random.randint(0, 150000, (1, min(512, context - start)))
        mx.eval(model(ids, cache=caches))
    curve: dict[int, float] = {}
    for width in WIDTHS:
        ids = mx.random.randint(0, 150000, (1, width))
        seconds = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            mx.eval(mx.argmax(model(ids, cache=caches), axis=-1))
            seconds.append(time.perf_counter() - start)
            kv_cache.trim_prompt_cache(caches, width)
        curve[width] = statistics.median(seconds[2:]) * 1e3
    return curve


def time_forwards(bits: int, contexts: Sequence[int], repeats: int, mode: str) -> list[dict]:
    """Width curves of stock MLX and of the installed kernels."""
    model = qwen3_8b(bits)
    heads = (32, 8, 128)
    table = []
    for context in contexts:
        stock = forward_curve(model, context, repeats)
        installed = install(
            model, exact=mode == "exact", attention_shape=heads, cache=Path("verdicts.json")
        )
        with installed:
            ours = forward_curve(model, context, repeats)
            state = installed.report()
        table.append({"bits": bits, "context": context, "stock_ms": stock, "ours_ms": ours})
        print(f"Qwen3-8B {bits}-bit @{context}", flush=True)
        print("  stock", " ".join(f"{w}: {ms:.2f}" for w, ms in stock.items()))
        print("  ours ", " ".join(f"{w}: {ms:.2f}" for w, ms in ours.items()), flush=True)
    for op in state.ops:
        print(f"  {op.op} {op.shape} x{op.layers}: {op.kernel} {op.serves} ({op.reason})")
    return table


def stamp(rate: float) -> dict[str, str]:
    """What a result must carry to mean anything."""
    device = this_device()
    return {
        "device": f"{device.name} ({device.architecture})",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm")),
        "command": "python " + " ".join(sys.argv),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "copy bandwidth": f"{rate / 1e12:.2f} TB/s",
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--only", choices=("matmul", "attention", "forward"), nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--mode", choices=("auto", "exact"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    chosen = parser.parse_args()
    where = this_device().backend
    if where == "cpu":
        sys.exit("[benchmark] The kernels need a GPU, got a CPU. Run this on Metal or CUDA.")
    parts = chosen.only or ["matmul", "attention", "forward"]
    rate = bandwidth()
    result: dict[str, Any] = {"stamp": stamp(rate)}
    print(json.dumps(result["stamp"], indent=1))
    if "matmul" in parts:
        result["matmul"] = [
            r for b in chosen.bits for r in time_matmuls(where, b, rate, chosen.steps)
        ]
    if "attention" in parts:
        result["attention"] = time_attention(where, rate, chosen.steps)
    if "forward" in parts:
        result["forward"] = [
            row
            for bits in chosen.bits
            for row in time_forwards(bits, chosen.contexts, chosen.repeats, chosen.mode)
        ]
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"kernels-{where}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
