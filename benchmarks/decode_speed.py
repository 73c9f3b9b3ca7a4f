"""Is plain decoding as fast as mlx-lm's? Paired, finely interleaved, median ratio of decode times.

    uv run benchmarks/decode_speed.py --tokens 64 --trials 9

Both continue the same prompt on the same loaded model, a few tokens of one, then of the other, so
that a change of load on the machine hits both alike. The first trial is a warm-up.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import mlx.core as mx
from mlx_lm.generate import generate_step

from spec_cli import opening
from spec_core import Pair, generate
from spec_targets import load_target

CHUNK = 4  # tokens in a row of one before the other's turn


def ours(target, ids: list[int], n: int) -> Iterator[int]:
    for round_ in generate(Pair(target), ids, max_tokens=n, stop_ids=()):
        yield from round_.tokens


def theirs(target, ids: list[int], n: int) -> Iterator[int]:
    for token, _ in generate_step(mx.array(ids), target.model, max_tokens=n):
        yield int(token)


def one_trial(target, ids: list[int], n: int, first: int) -> tuple[list[float], bool]:
    """Seconds of (ours, theirs) after the first token, and whether the ids agree."""
    streams = [ours(target, ids, n), theirs(target, ids, n)]
    tokens: list[list[int]] = [[next(stream)] for stream in streams]
    seconds = [0.0, 0.0]
    for turn in range(2 * ((n - 1) // CHUNK)):
        which = (turn + first + turn // 2) % 2  # ours theirs theirs ours ...
        start = time.perf_counter()
        tokens[which] += [next(streams[which]) for _ in range(CHUNK)]
        seconds[which] += time.perf_counter() - start
    return seconds, tokens[0] == tokens[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; the embedded default without")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=9)
    arguments = parser.parse_args()
    name, folder = opening.locate_model(arguments.model)
    target, tokenizer = load_target(folder)
    ids = tokenizer.encode("The weather in spring is")
    ratios, n = [], arguments.tokens
    for trial in range(arguments.trials + 1):
        seconds, same = one_trial(target, ids, n, trial % 2)
        if trial == 0:
            continue
        ratios.append(seconds[1] / seconds[0])
        speeds = [CHUNK * ((n - 1) // CHUNK) / s for s in seconds]
        print(
            f"trial {trial}: ours {speeds[0]:.2f} tok/s, mlx-lm {speeds[1]:.2f} tok/s, "
            f"ratio {ratios[-1]:.3f}, same ids: {same}",
            flush=True,
        )
    print(f"median ratio ours / mlx-lm: {statistics.median(ratios):.3f} ({name}, {n} tokens)")


if __name__ == "__main__":
    main()
