"""What a draft costs beside one target step, at several depths, and what it must at least cost.

    uv run benchmarks/drafters.py --model FOLDER --head dspark=FOLDER --head dflash=FOLDER

A draft's floor is the bytes that it must read (the head's matrices, the context's keys and values,
the target's lm_head where it is borrowed) over the bandwidth that a large read reaches here.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from spec_cli.env import kernel_verdicts, prepare_mlx
from spec_core import Sampling, TargetOutput
from spec_drafters import load_drafter
from spec_targets import load_target

# Wall time; `--clock cpu` counts the processor time of all threads, for a machine that others use.
CLOCK: dict[str, Callable[[], float]] = {"now": time.perf_counter}


def median_ms(call: Callable[[], Any], n: int) -> float:
    """Median time of a call that ends by waiting for the device; two calls warm up."""
    times = []
    for _ in range(n + 2):
        start = CLOCK["now"]()
        call()
        times.append((CLOCK["now"]() - start) * 1e3)
    return statistics.median(times[2:])


def bandwidth(n_bytes: int) -> float:
    """Bytes a second that the better of a large matrix-vector product and a large sum reads."""
    x = mx.ones((n_bytes // 16384, 4096))
    v = mx.ones((4096, 1))
    mx.eval(x, v)
    times = [median_ms(lambda: mx.eval(x @ v), 7), median_ms(lambda: mx.eval(x.sum()), 7)]
    return n_bytes / (min(times) / 1e3)


def head_bytes(model: Any) -> int:
    """Bytes of the matrix that makes the target's logits."""
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore[reportAssignmentType]
    own = [a.nbytes for name, a in flat if "lm_head" in name]
    return sum(own or [a.nbytes for name, a in flat if "embed_tokens" in name])


def draft_bytes(drafter: Any, target: Any, depth: int) -> int:
    """Bytes that one draft must read; tables that are looked up by id count for nothing."""
    body, chain = drafter._body, getattr(drafter, "_chain", None)
    markov = chain.markov if chain is not None else None
    tables = [] if markov is None else [markov.before]
    if body._embedding is not None:
        tables.append(body._embedding)
    looked_up = sum(a.nbytes for t in tables for a in t.arrays)
    slots = drafter.max_draft
    again = 0  # the second Markov matrix is read once a slot
    if markov is not None:
        again = (slots - 1) * sum(a.nbytes for a in markov.after.arrays)
    borrowed = 0 if drafter._output.is_own else head_bytes(target.model)
    heads = drafter.head.backbone
    row = 2 * len(heads.views) * heads.n_kv_heads * heads.head_dim
    itemsize = body._caches[0].arrays[0].itemsize
    return drafter.report.nbytes - looked_up + again + borrowed + depth * row * itemsize


def at_depth(drafter: Any, target: Any, depth: int, n: int, speed: float) -> dict[str, Any]:
    """Draft and observe times with `depth` rows of context."""
    drafter.reset()
    dtype = target.embed(mx.array([0])).dtype

    def feed(rows: int) -> None:
        taps = tuple(
            mx.random.normal((rows, target.hidden_size)).astype(dtype) for _ in drafter.taps
        )
        mx.eval(taps)
        drafter.observe([1] * rows, TargetOutput(mx.zeros((rows, 1)), taps))

    left = depth
    while left > 0:
        feed(min(left, 512))
        left -= 512

    def draft() -> None:
        made = drafter.draft(5, drafter.max_draft, sampling=Sampling(), key=mx.random.key(0))
        mx.eval(made.tokens)

    def round_() -> None:
        feed(3)
        draft()

    draft_ms = median_ms(draft, n)
    moved = draft_bytes(drafter, target, depth)
    return {
        "depth": depth,
        "draft_ms": draft_ms,
        "observe_and_draft_ms": median_ms(round_, n),
        "moved_mb": moved / 1e6,
        "floor_ms": moved / speed * 1e3,
    }


def target_steps(target: Any, depth: int, widths: list[int], n: int) -> dict[int, float]:
    """Time of a verify of each width behind `depth` rows."""
    cache = target.make_cache()
    for start in range(0, depth, 512):
        target.prefill([7] * min(512, depth - start), cache)
    times = {}
    for width in widths:

        def step(width: int = width) -> None:
            mx.eval(target.verify(mx.array([5] * width), cache).logits)
            target.commit(cache, 0)

        times[width] = median_ms(step, n)
    return times


def main() -> None:
    """Run the command."""
    prepare_mlx()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", action="append", default=[], help="name=folder")
    parser.add_argument("--bits", type=int, nargs="+", default=[16])
    parser.add_argument("--depths", type=int, nargs="+", default=[256, 2048, 8000])
    parser.add_argument("--target-depth", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--cpu", action="store_true", help="on the CPU backend")
    given = parser.parse_args()
    if given.clock == "cpu":
        CLOCK["now"] = time.process_time
    if given.cpu:
        mx.set_default_device(mx.cpu)
    dtype = getattr(mx, given.dtype)
    target, _ = load_target(given.model, dtype=dtype, verdicts=kernel_verdicts())
    speed = bandwidth(2**30 if mx.default_device() == mx.gpu else 2**28)
    steps = target_steps(target, given.target_depth, [1, 4, 8], given.repeats)
    result: dict[str, Any] = {
        "device": str(mx.default_device()),
        "mlx": version("mlx"),
        "dtype": given.dtype,
        "clock": given.clock,
        "bandwidth_gb_s": speed / 1e9,
        "target_ms_by_width": steps,
        "target_depth": given.target_depth,
        "heads": {},
    }
    print(f"bandwidth {speed / 1e9:.0f} GB/s; target step {steps}")
    for entry in given.head:
        name, folder = entry.split("=", 1)
        for bits in given.bits:
            drafter = load_drafter(folder, target, mode=name, bits=bits, window=0)
            label = f"{name}, {bits} bits"
            rows = [at_depth(drafter, target, d, given.repeats, speed) for d in given.depths]
            result["heads"][label] = rows
            for row in rows:
                print(label, {k: round(v, 3) for k, v in row.items()})
    if given.json:
        with open(given.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
