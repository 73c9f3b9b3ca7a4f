"""Runs prompts and adds up what the rounds say: for `spec benchmark` and `spec eval`."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from spec_core import Cap, Pair, Sampling, Stats, StatsMeter, generate
from spec_core.stats import PositionCounts


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        tokens: Emitted ids.
        stats: Its figures.
        rounds: (drafts sent, drafts accepted, cut by a stop) of each round after the prefill.
    """

    tokens: tuple[int, ...]
    stats: Stats
    rounds: tuple[tuple[int, int, bool], ...]


def run_once(
    pair: Pair, ids: Sequence[int], *, max_tokens: int, sampling: Sampling, cap: Cap | None
) -> Run:
    """Generate from one prompt and keep its figures."""
    meter, tokens, rounds = StatsMeter(), [], []
    for round_ in generate(pair, ids, max_tokens=max_tokens, sampling=sampling, cap=cap):
        meter.add(round_)
        tokens += round_.tokens
        if round_.kind != "prefill":
            rounds.append((round_.n_drafted, round_.n_accepted, round_.truncated))
    return Run(tuple(tokens), meter.result(), tuple(rounds))


@dataclass(slots=True)
class Tally:
    """Acceptance over many runs of one task."""

    n_prompts: int = 0
    n_tokens: int = 0
    n_rounds: int = 0
    kept: int = 0
    positions: PositionCounts = field(default_factory=PositionCounts)

    def add(self, run: Run) -> None:
        """Count one run; a last round that a stop cut short is left out."""
        self.n_prompts += 1
        self.n_tokens += len(run.tokens)
        for n_drafted, n_accepted, cut in run.rounds:
            if cut:
                continue
            self.n_rounds += 1
            self.kept += n_accepted + 1
            self.positions.add(n_drafted, n_accepted)

    def figures(self) -> dict[str, Any]:
        """Acceptance length, rate, and both by position."""
        return {
            "prompts": self.n_prompts,
            "tokens": self.n_tokens,
            "rounds": self.n_rounds,
            "acceptance_length": self.kept / self.n_rounds if self.n_rounds else 1.0,
            "acceptance_rate": self.positions.rate,
            "accepted_by_position": list(self.positions.by_position),
        }


@dataclass(frozen=True, slots=True)
class Lane:
    """One mode of a benchmark.

    Attributes:
        mode: Its name; "baseline" is what the others are compared with.
        pair: Ready to generate.
        cap: Of all its generations, so that an adaptive one learns; None leaves it to the loop.
    """

    mode: str
    pair: Pair
    cap: Cap | None


def race(
    lanes: Sequence[Lane],
    prompts: dict[str, list[list[int]]],
    *,
    trials: int,
    max_tokens: int,
    sampling: Sampling,
    on_step: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Every mode on every prompt, interleaved, `trials` times after a warm-up.

    Args:
        lanes: The first one must be the baseline.
        prompts: Task -> ids of its prompts.
        trials: Timed repetitions.
        max_tokens: Per generation.
        sampling: For all modes alike.
        on_step: Called with (generations done, generations in all).

    Returns:
        One row per mode and task, with the keys of `spec benchmark --json`.
    """
    for lane in lanes:  # compile kernels, touch every weight
        first = next(iter(prompts.values()))[0]
        run_once(lane.pair, first, max_tokens=8, sampling=sampling, cap=lane.cap)
    total = trials * len(lanes) * sum(len(p) for p in prompts.values())
    done, rows = 0, []
    for task, many in prompts.items():
        runs: dict[str, list[list[Run]]] = {lane.mode: [] for lane in lanes}
        for trial in range(trials):
            for lane in lanes:
                runs[lane.mode].append([])
            for n, ids in enumerate(many):
                for lane in _rotated(lanes, trial + n):
                    runs[lane.mode][-1].append(
                        run_once(
                            lane.pair,
                            ids,
                            max_tokens=max_tokens,
                            sampling=sampling,
                            cap=lane.cap,
                        )
                    )
                    done += 1
                    on_step(done, total)
        rows += [_row(lane.mode, task, runs[lane.mode], runs[lanes[0].mode]) for lane in lanes]
    return rows


def _rotated(lanes: Sequence[Lane], by: int) -> Iterable[Lane]:
    shift = by % len(lanes)
    return [*lanes[shift:], *lanes[:shift]]


def _row(mode: str, task: str, runs: list[list[Run]], baseline: list[list[Run]]) -> dict[str, Any]:
    speeds = [_speed(trial) for trial in runs]
    pairs = [(_speed(a), _speed(b)) for a, b in zip(runs, baseline, strict=True)]
    ratios = [own / plain for own, plain in pairs if plain]  # none where texts end at once
    tally = Tally()
    for run in chain.from_iterable(runs):
        tally.add(run)
    same = all(
        a.tokens == b.tokens
        for trial, other in zip(runs, baseline, strict=True)
        for a, b in zip(trial, other, strict=True)
    )
    return {
        "mode": mode,
        "prompts": task,
        "tokens_per_second": statistics.median(speeds),
        "speedup": statistics.median(ratios) if ratios else None,
        "prefill_seconds": statistics.median(_prefill(trial) for trial in runs),
        "acceptance_length": tally.figures()["acceptance_length"],
        "identical": same,
        "near_ties": sum(run.stats.near_ties for run in runs[0]),
        "trials": len(runs),
    }


def _prefill(trial: list[Run]) -> float:
    """Mean seconds until the first token."""
    return statistics.fmean(run.stats.prefill_s for run in trial)


def _speed(trial: list[Run]) -> float:
    """Decoded tokens per second over all prompts of a trial, the prefill left out."""
    seconds = sum(run.stats.decode_s for run in trial)
    tokens = sum(max(run.stats.n_tokens - 1, 0) for run in trial)
    return tokens / seconds if seconds > 0 else 0.0
