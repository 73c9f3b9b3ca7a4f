"""Hold the adaptive cap against every fixed cap on scripted machines and drafters.

    uv run python benchmarks/controller.py [--seeds 6] [--write docs/benchmarks/controller.md]

Times are simulated, so the figures do not depend on the machine that runs this. The best fixed cap
is found in hindsight, by playing the same texts with every cap.
"""

import argparse
import datetime
import importlib.metadata
import platform
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_calibrate import CapController
from spec_calibrate.scenarios import (
    changing_scenarios,
    hostile_scenarios,
    random_scenario,
    steady_scenarios,
)
from spec_calibrate.simulate import Scenario, Verdict, judge

HEADER = """\
| scenario | best fixed cap | its speed over plain | adaptive, of best fixed | adaptive, of plain |
| --- | --- | --- | --- | --- |"""


def main() -> None:
    """Play all scenarios and print or write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=6, help="texts per scenario")
    parser.add_argument("--random", type=int, default=100, help="machines drawn at random")
    parser.add_argument("--write", type=Path, help="file for the report; printed without")
    options = parser.parse_args()
    text = report(range(options.seeds), options.random)
    if options.write is None:
        print(text)
    else:
        options.write.write_text(text, encoding="utf-8")


def report(seeds: Sequence[int], n_random: int) -> str:
    """The page, in Markdown."""
    parts = [stamp(len(seeds))]
    for title, bar, scenarios in (
        ("Steady: at least 0.95 of the best fixed cap", 0.95, steady_scenarios()),
        ("Changing: at least 0.90 of the best fixed cap", 0.90, changing_scenarios()),
        ("Hostile: at least 0.97 of plain decoding", 0.97, hostile_scenarios()),
    ):
        verdicts = [play(scenario, seeds) for scenario in scenarios]
        least = min(v.of_plain if title.startswith("Hostile") else v.of_best for v in verdicts)
        verdict = "met" if least >= bar else "NOT met"
        parts.append(f"## {title}: {verdict}, the least is {least:.3f}\n\n{HEADER}")
        parts[-1] += "".join("\n" + row(v) for v in verdicts)
    if n_random:
        parts.append(at_random(n_random))
    return "\n\n".join(parts) + "\n"


def play(scenario: Scenario, seeds: Sequence[int]) -> Verdict:
    """One scenario, with a line of progress."""
    print(scenario.name, file=sys.stderr)
    return judge(scenario, CapController, seeds)


def row(verdict: Verdict) -> str:
    """One line of the table."""
    gain = max(verdict.fixed) / verdict.plain
    return (
        f"| {verdict.name} | {verdict.best_fixed} | {gain:.2f} | {verdict.of_best:.3f} | "
        f"{verdict.of_plain:.3f} |"
    )


def at_random(n: int) -> str:
    """Machines and drafters that were not used for tuning, and how the shares spread."""
    verdicts = [play(random_scenario(random.Random(s)), range(4)) for s in range(1000, 1000 + n)]
    shares = sorted(v.of_best for v in verdicts)
    plain = min(v.of_plain for v in verdicts)
    met = sum(share >= 0.95 for share in shares)
    return (
        f"## {n} machines and drafters drawn at random, texts of 256 to 2048 tokens\n\n"
        f"Share of the best fixed cap's speed: median {shares[n // 2]:.3f}, "
        f"lowest tenth below {shares[n // 10]:.3f}, lowest {shares[0]:.3f}; "
        f"{met} of {n} reach 0.95. Lowest share of plain decoding: {plain:.3f}."
    )


def stamp(n_seeds: int) -> str:
    """What was run, where and when."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("spec-calibrate", "spec-core")
    )
    command = "uv run python " + " ".join(sys.argv)
    return (
        "# The adaptive cap on scripted machines\n\n"
        f"{datetime.date.today().isoformat()}, {versions}, Python {platform.python_version()}; "
        f"`{command}`. Times are simulated: they do not depend on the machine. Each figure is over "
        f"{n_seeds} texts. The best fixed cap is found in hindsight, by playing the same texts "
        "with every cap. The adaptive cap is given cost curves that are 3% off at random."
    )


if __name__ == "__main__":
    main()
