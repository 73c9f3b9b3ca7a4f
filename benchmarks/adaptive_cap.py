"""Race `--max-draft auto` against every fixed cap and plain decoding on a real model.

    uv run python benchmarks/adaptive_cap.py [--caps 1,2,3,5,7,full] [--write FILE.json]

Paired and interleaved: each prompt is decoded with every cap before the next one, in another order
each time. Prints a table by prompt set, with the share of the best fixed cap and of plain decoding
that the adaptive cap reaches, the medians over trials.
"""

import argparse
import datetime
import json
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from spec_calibrate import CapController
from spec_cli import caps, machine, opening
from spec_cli.measure import run_once
from spec_cli.prompts import BUNDLED, read_prompts
from spec_core import Cap, FixedCap, Pair, Sampling

OPTIONS: dict[str, Any] = {
    "drafter": None,
    "drafter_bits": 8,
    "drafter_window": 4096,
    "confidence_threshold": None,
    "kv_bits": None,
}


def main() -> None:
    """Run the race and print or write the result."""
    options = parse()
    opened = opening.open_target(options.model)
    OPTIONS["drafter"], OPTIONS["drafter_bits"] = options.drafter, options.bits
    extra = {"bits": options.bits, "window": 4096, "lookup_drafts": False}
    wish = opening.Wish(options.mode, options.drafter, extra if options.mode != "lookup" else {})
    pair = opened.pair(wish)
    assert pair.drafter is not None
    calibration = caps.calibration_of(opened, pair, OPTIONS)
    most = pair.drafter.max_draft
    lanes: dict[str, Cap] = {"0": FixedCap(0)}
    for text in options.caps.split(","):
        n = most if text == "full" else min(int(text), most)
        lanes[str(n)] = FixedCap(n)
    lanes["auto"] = CapController(calibration.curves, max_draft=most)
    rows = race(pair, lanes, options)
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "uv run python " + " ".join(sys.argv),
        "machine": machine.describe(),
        "model": opened.name,
        "mode": pair.drafter.name,
        "calibration": calibration.to_json(),
        "rows": rows,
    }
    for row in rows:
        shown = "  ".join(f"{lane} {rate:.1f}" for lane, rate in row["tokens_per_second"].items())
        print(
            f"{row['prompts']:10s} auto {row['of_best_fixed']:.3f} of the best fixed cap "
            f"({row['best_fixed']}), {row['of_plain']:.3f} of plain   {shown}"
        )
    if options.write is not None:
        options.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="folder, hub id or gguf:FILE; the embedded one without")
    parser.add_argument("--drafter", help="folder or hub id; the embedded model's own without")
    parser.add_argument("--bits", type=int, default=8, help="of the drafter")
    parser.add_argument("--mode", default="dspark")
    parser.add_argument("--caps", default="1,2,3,5,full", help="fixed caps besides 0")
    parser.add_argument("--set", action="append", help="only this prompt set; repeatable")
    parser.add_argument("--limit", type=int, default=3, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--write", type=Path, help="JSON file for the result")
    return parser.parse_args()


def race(pair: Pair, lanes: dict[str, Cap], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every lane on every prompt; a row per prompt set."""
    sets: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in read_prompts(BUNDLED):
        if options.set and prompt.task not in options.set:
            continue
        if len(sets[prompt.task]) < options.limit:
            sets[prompt.task].append(prompt.encode(pair.tokenizer, pair.target, raw=False))
    rng, rows = random.Random(0), []
    settings = {"max_tokens": options.max_tokens, "sampling": Sampling()}
    for cap in lanes.values():  # compile and warm up
        run_once(pair, next(iter(sets.values()))[0], max_tokens=16, sampling=Sampling(), cap=cap)
    for task, prompts in sets.items():
        rates: dict[str, list[float]] = {lane: [] for lane in lanes}
        for _ in range(options.trials):
            seconds = dict.fromkeys(lanes, 0.0)
            n_tokens = dict.fromkeys(lanes, 0)
            for ids in prompts:
                for lane in rng.sample(list(lanes), len(lanes)):
                    stats = run_once(pair, ids, cap=lanes[lane], **settings).stats
                    seconds[lane] += stats.decode_s
                    n_tokens[lane] += stats.n_tokens - 1
            for lane in lanes:
                rates[lane].append(n_tokens[lane] / seconds[lane])
        rows.append(row(task, rates))
    return rows


def row(task: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of one prompt set: the median over trials of paired ratios."""
    medians = {lane: statistics.median(values) for lane, values in rates.items()}
    best = max((lane for lane in rates if lane != "auto"), key=medians.__getitem__)

    def against(lane: str) -> float:
        pairs = zip(rates["auto"], rates[lane], strict=True)
        return statistics.median(auto / other for auto, other in pairs)

    return {
        "prompts": task,
        "tokens_per_second": medians,
        "best_fixed": best,
        "of_best_fixed": against(best),
        "of_plain": against("0"),
        "trials": len(rates["auto"]),
    }


if __name__ == "__main__":
    main()
