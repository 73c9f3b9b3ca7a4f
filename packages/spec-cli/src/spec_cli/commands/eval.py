"""`spec eval`: acceptance by task from a JSONL of prompts, the metric of the papers."""

from pathlib import Path
from typing import Any

import click

from spec_cli import caps, render
from spec_cli.commands.options import (
    MODES,
    drafter_option,
    drafter_options,
    model_options,
    names_of,
    open_target,
    refuse_unused,
    sampling_of,
    sampling_options,
    wish_of,
)
from spec_cli.prompts import BUNDLED, read_prompts


@click.command("eval", short_help="Show acceptance by task.")
@click.argument("prompts", type=click.Path(path_type=Path), default=BUNDLED)
@model_options
@click.option("--mode", type=click.Choice(MODES), default="auto", show_default=True)
@drafter_option
@drafter_options
@sampling_options
@click.option("--max-tokens", type=click.IntRange(2), default=192, show_default=True)
@click.option("--raw", is_flag=True, help="Prompts as they stand, without a chat template.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def evaluate(prompts: Path, **options: Any) -> None:
    """Acceptance by task on PROMPTS, a JSONL file ({"id", "task", "prompt" or "messages"})."""
    from spec_cli.measure import Tally, run_once

    refuse_unused(options, options["mode"])
    sampling, many = sampling_of(options), read_prompts(prompts)
    opened = open_target(options)
    pair = opened.pair(wish_of(options, options["mode"], options["drafter"]))
    wish = options["max_draft"]  # acceptance is a property of the drafter: of its whole block
    options["max_draft"] = caps.WHOLE_BLOCK if wish is None else wish
    chosen = caps.caps_for(opened, pair, options)
    cap = chosen.make()
    encoded = [p.encode(opened.tokenizer, opened.target, raw=options["raw"]) for p in many]
    tallies = {prompt.task: Tally() for prompt in many}
    with render.progress("prompts", unit="prompts") as step:
        for n, (prompt, ids) in enumerate(zip(many, encoded, strict=True), 1):
            run = run_once(pair, ids, max_tokens=options["max_tokens"], sampling=sampling, cap=cap)
            tallies[prompt.task].add(run)
            step(n, len(many))
    figures = {task: tally.figures() for task, tally in tallies.items()}
    mean = sum(f["acceptance_length"] for f in figures.values()) / len(figures)
    mode, _ = names_of(pair.drafter)
    if options["as_json"]:
        render.one_json(
            {
                "model": opened.name,
                "mode": mode,
                "max_draft": chosen.shown,
                "tasks": figures,
                "mean_acceptance_length": mean,
            }
        )
        return
    rows = [
        [
            task, str(f["prompts"]), str(f["rounds"]), f"{f['acceptance_length']:.2f}",
            f"{f['acceptance_rate']:.2f}",
            " ".join(f"{a:.2f}" for a in f["accepted_by_position"][:8]),
        ]
        for task, f in figures.items()
    ]  # fmt: skip
    rows.append(["mean", "", "", f"{mean:.2f}", "", ""])
    columns = ["task", "prompts", "rounds", "tokens a round", "rate", "rate by position"]
    render.table(f"{opened.name}, {mode}", columns, rows)
