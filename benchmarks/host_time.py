"""Where the host's time of one block goes: building its graph, encoding it, waiting for the device.

    uv run benchmarks/host_time.py --rows 1 8

A random model of SmolLM2-135M's shape in bfloat16 behind some 300 positions, five layers tapped.
Lanes take turns: stock MLX; with the few-row kernels, on a GPU where they may run; and with blocks
replayed as graphs on top. Shapes are raced first, once on a machine, as when a model is loaded.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from random_model import WARM_UP, random_target

from spec_cli.env import kernel_verdicts, prepare_mlx
from spec_kernels import install, this_device
from spec_targets import MlxTarget

HEADS = (9, 3, 64)  # of queries, of the cache, and their dimension
SMOLLM2 = llama.ModelArgs(
    model_type="llama",
    hidden_size=576,
    num_hidden_layers=30,
    intermediate_size=1536,
    num_attention_heads=HEADS[0],
    rms_norm_eps=1e-5,
    vocab_size=49152,
    num_key_value_heads=HEADS[1],
    head_dim=HEADS[2],
    max_position_embeddings=8192,
    rope_theta=1e5,
    tie_word_embeddings=True,
)
CONTEXT = 300
TAPS = (1, 8, 15, 22, 28)
PARTS = ("build", "encode", "wait", "in all")


def lanes() -> dict[str, MlxTarget]:
    """What is timed on this device, by name."""
    made = {"stock": random_target(SMOLLM2, 16)}
    if this_device().backend == "cpu":
        return made
    for name, replay in (("kernels", False), ("kernels, replayed", True)):
        target = made[name] = random_target(SMOLLM2, 16)
        installed = install(target.model, mode="on", cache=kernel_verdicts(), attention_shape=HEADS)
        target.use_kernels(installed, replay=replay)
    return made


def block_timer(target: MlxTarget, rows: int) -> Callable[[], list[float]]:
    """A function that runs one block of which half is kept: seconds by part."""
    cache = target.make_cache()
    target.prefill([i % SMOLLM2.vocab_size for i in range(CONTEXT)], cache)
    block = mx.arange(rows, dtype=mx.int32)

    def once() -> list[float]:
        start = time.perf_counter()
        output = target.verify(block, cache, taps=TAPS)
        chosen = mx.argmax(output.logits, axis=-1)
        built = time.perf_counter()
        mx.async_eval(chosen, *output.taps)
        encoded = time.perf_counter()
        mx.eval(chosen)
        done = time.perf_counter()
        target.commit(cache, (rows + 1) // 2)
        return [built - start, encoded - built, done - encoded, done - start]

    return once


def measure(targets: dict[str, MlxTarget], rows: int, repeats: int) -> dict[str, list[float]]:
    """Median milliseconds by lane and part, the lanes in turn."""
    timers = {name: block_timer(target, rows) for name, target in targets.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in timers}
    warm_up = WARM_UP if len(targets) > 1 else 2
    for turn in range(warm_up + repeats):
        for name, once in timers.items():
            seconds = once()
            if turn >= warm_up:
                found[name].append(seconds)
    return {
        name: [1e3 * statistics.median(part) for part in zip(*blocks, strict=True)]
        for name, blocks in found.items()
    }


def main() -> None:
    """The command line."""
    prepare_mlx()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=25)
    given: Any = parser.parse_args()
    targets = lanes()
    print(f"{this_device().name}, mlx {version('mlx')}, milliseconds")
    print("rows  " + " ".join(f"{part:>8}" for part in PARTS))
    for rows in given.rows:
        for name, parts in measure(targets, rows, given.repeats).items():
            print(f"{rows:4}  " + " ".join(f"{ms:8.2f}" for ms in parts) + f"  {name}", flush=True)


if __name__ == "__main__":
    main()
