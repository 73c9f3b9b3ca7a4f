"""The loop's own time per round: everything but the model's forward.

    uv run benchmarks/loop_overhead.py

The target returns arrays that are already computed, so what is left is the accept rule, the one
device read, commits, stop handling and Python.
"""

import argparse
import statistics
import time

import mlx.core as mx

from spec_core import FixedCap, Pair, Sampling, TargetOutput, generate
from spec_core.testing import ScriptedDrafter, ToyTarget


class ReadyTarget(ToyTarget):
    """Returns logits that were computed beforehand; keeps ids on the host."""

    def __init__(self, vocab_size: int, widest: int) -> None:
        super().__init__(vocab_size=4)
        self.vocab_size = vocab_size
        self.ready = [mx.random.normal((n, vocab_size)) for n in range(1, widest + 1)]
        mx.eval(self.ready)

    def verify(self, block, cache, *, taps=()):
        cache.n_open = block.shape[0]
        cache.tokens = mx.zeros((cache.offset + cache.n_open,), mx.int32)
        return TargetOutput(self.ready[block.shape[0] - 1])


def per_round_ms(target: ReadyTarget, drafter, sampling: Sampling) -> tuple[float, float]:
    """Medians over runs, in milliseconds a round: (wall, processor time of the loop's thread)."""
    walls, threads = [], []
    for _ in range(9):
        rounds = generate(
            Pair(target, drafter), [1], max_tokens=200, sampling=sampling, cap=FixedCap(7)
        )
        next(rounds)
        start, start_thread = time.perf_counter(), time.thread_time()
        n_rounds = sum(1 for _ in rounds)
        walls.append((time.perf_counter() - start) / n_rounds * 1e3)
        threads.append((time.thread_time() - start_thread) / n_rounds * 1e3)
    return statistics.median(walls), statistics.median(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=512, help="small: what is left is Python")
    vocab_size = parser.parse_args().vocab
    target = ReadyTarget(vocab_size, 8)
    script = ScriptedDrafter([0] * 400, 1, vocab_size, max_draft=7)
    for name, drafter in (("plain, pipelined", None), ("7 drafts", script)):
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
            kind = "greedy" if sampling.greedy else "sampled"
            wall, thread = per_round_ms(target, drafter, sampling)
            print(f"{name:17} {kind:8} {thread:.3f} ms a round of Python, {wall:.3f} ms in all")


if __name__ == "__main__":
    main()
