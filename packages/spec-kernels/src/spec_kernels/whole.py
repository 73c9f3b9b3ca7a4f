"""The last word on a model's kernels: whole forwards of the model itself.

A race of one shape cannot see what a forward hides or shares: on an H200 the host sets the pace of
small chains, so that the kernels lose at one row there and win it in the model. Knows arms, row
counts and clocks; knows no layers.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from spec_kernels.race import WIN, neighbours

Arm = Literal["stock", "raced", "all"]
Forward = Callable[[int], object]
SingleRace = Callable[[Callable[[bool], None]], Mapping[int, Mapping[str, float]]]
ARMS: tuple[Arm, ...] = ("stock", "raced", "all")
REPEATS = 7


def race_forwards(
    forward: Forward,
    use: Callable[[Arm], None],
    rows_raced: Sequence[int],
    *,
    repeats: int = REPEATS,
) -> dict[int, dict[Arm, float]]:
    """Time the model with stock matmuls, with the shapes that won, and with every kernel.

    Args:
        forward: runs the model on so many rows until the result is on the host.
        use: switches the model to an arm.
        rows_raced: row counts to time.
        repeats: timed forwards of an arm and row count, arms in turn, after one warm-up.

    Returns:
        Median seconds by rows and arm.
    """
    found: dict[int, dict[Arm, float]] = {}
    for rows in rows_raced:
        taken: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(repeats + 1):
            for arm in ARMS:
                use(arm)
                start = time.perf_counter()
                forward(rows)
                if turn:
                    taken[arm].append(time.perf_counter() - start)
        found[rows] = {arm: statistics.median(seconds) for arm, seconds in taken.items()}
    return found


def replays_win(seconds: Mapping[int, Mapping[str, float]]) -> bool:
    """Whether replayed forwards of one row are `WIN` times as fast as the model's own everywhere.

    Args:
        seconds: by depth of the context and arm, "own" and "replayed"; empty if there is no replay.
    """
    return bool(seconds) and all(by["own"] >= WIN * by["replayed"] for by in seconds.values())


def best_arms(seconds: Mapping[int, Mapping[Arm, float]]) -> tuple[Arm, ...]:
    """The arm of each number of rows from 0 to the last one timed.

    Stock stays unless another arm is `WIN` times as fast at the measured counts on both sides.
    """
    best: dict[int, Arm] = {}
    for rows, by_arm in seconds.items():
        arm = min(ARMS, key=lambda arm: by_arm[arm])
        best[rows] = arm if by_arm["stock"] >= WIN * by_arm[arm] else "stock"
    arms: list[Arm] = ["stock"]
    measured = tuple(best)
    for row in range(1, measured[-1] + 1):
        below, above = (best[rows] for rows in neighbours(measured, row))
        arms.append("stock" if "stock" in (below, above) else below)
    return tuple(arms)
