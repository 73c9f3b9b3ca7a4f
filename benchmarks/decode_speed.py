"""Is plain decoding as fast as mlx-lm's? Paired, interleaved, median ratio of decode times.

    uv run benchmarks/decode_speed.py --tokens 64 --trials 7

Both run the same loaded model from the same prompt; the first trial of each is a warm-up.
"""

import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.generate import generate_step

from spec_cli import opening
from spec_core import Pair, generate
from spec_targets import load_target


def time_ours(target, ids: list[int], n: int) -> float:
    """Seconds from the first token to the last."""
    rounds = generate(Pair(target), ids, max_tokens=n, stop_ids=())
    next(rounds)
    start = time.perf_counter()
    for _ in rounds:
        pass
    return time.perf_counter() - start


def time_theirs(target, ids: list[int], n: int) -> float:
    """The same span in mlx-lm's loop."""
    tokens = generate_step(mx.array(ids), target.model, max_tokens=n)
    next(tokens)
    start = time.perf_counter()
    for _ in range(n - 1):
        next(tokens)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; the embedded default without")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=7)
    arguments = parser.parse_args()
    name, folder = opening.locate_model(arguments.model)
    target, tokenizer = load_target(folder)
    ids = tokenizer.encode("The weather in spring is")
    ratios, n = [], arguments.tokens
    for trial in range(arguments.trials + 1):
        pair = [time_ours, time_theirs] if trial % 2 else [time_theirs, time_ours]
        seconds = {run.__name__: run(target, ids, n) for run in pair}
        if trial == 0:
            continue
        ratios.append(seconds["time_theirs"] / seconds["time_ours"])
        print(
            f"trial {trial}: ours {(n - 1) / seconds['time_ours']:.2f} tok/s, "
            f"mlx-lm {(n - 1) / seconds['time_theirs']:.2f} tok/s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median ratio ours / mlx-lm: {statistics.median(ratios):.3f} ({name}, {n} tokens)")


if __name__ == "__main__":
    main()
