"""`spec benchmark`: baseline against modes, paired and interleaved, with an identity verdict."""

from pathlib import Path
from typing import Any

import click

from spec_cli import caps, machine, opening, render
from spec_cli.commands.options import (
    MODES,
    drafter_options,
    model_options,
    names_of,
    open_target,
    refuse_unused,
    sampling_of,
    sampling_options,
    wish_of,
)
from spec_cli.commands.plots import check_plot, draw, plot_option
from spec_cli.prompts import BUNDLED, read_prompts


@click.command()
@model_options
@click.option(
    "--mode", "modes", type=click.Choice(MODES[1:-1]), multiple=True,
    help="Mode to race against baseline; repeatable.  [default: what --mode auto picks]",
)  # fmt: skip
@click.option("--drafter", "drafters", multiple=True,
              help="Folder or hub id of a drafter to race; repeatable.")  # fmt: skip
@drafter_options
@sampling_options
@click.option("--prompts", type=click.Path(path_type=Path), default=BUNDLED,
              help="JSONL of prompts.  [default: the bundled sets]")  # fmt: skip
@click.option("--set", "sets", multiple=True, help="Only this prompt set; repeatable.")
@click.option("--limit", type=click.IntRange(1), default=3, show_default=True,
              help="Most prompts of a set.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--trials", type=click.IntRange(1), default=3, show_default=True)
@click.option("--raw", is_flag=True, help="Prompts as they stand, without a chat template.")
@plot_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def benchmark(modes: tuple[str, ...], drafters: tuple[str, ...], **options: Any) -> None:
    """Race modes against plain decoding on prompt sets."""
    from spec_cli.measure import race
    from spec_core import Sampling

    check_plot(options["plot"])
    refuse_unused(options, *(modes or ("auto",)), *("auto" for _ in drafters))
    sampling = sampling_of(options)
    prompts = _chosen(options)
    opened = open_target(options)
    lanes = _lanes(opened, modes, drafters, options)
    encoded = {
        task: [p.encode(opened.tokenizer, opened.target, raw=options["raw"]) for p in many]
        for task, many in prompts.items()
    }
    with render.progress("racing", unit="runs") as step:
        rows = race(
            lanes,
            encoded,
            trials=options["trials"],
            max_tokens=options["max_tokens"],
            sampling=sampling,
            on_step=step,
        )
    if options["plot"] is not None:
        from spec_calibrate.plot import save_race

        found = machine.describe()
        where = found.get("device", f"a CPU, {found['system']}")
        draw(save_race, rows, options["plot"], f"{opened.name} on {where}")
    if options["as_json"]:
        settings = {name: options[name] for name in ("max_tokens", "trials", "limit", "max_draft")}
        settings |= {name: getattr(sampling, name) for name in Sampling.__slots__}
        render.one_json(
            {
                "machine": machine.describe(),
                "model": opened.name,
                "drafter": ", ".join(drafters) or None,
                "settings": settings,
                "rows": rows,
            }
        )
        return
    render.table(
        f"{opened.name}, {options['trials']} trials, medians",
        ["prompts", "mode", "tok/s", "speed-up", "prefill s", "tokens a round", "same ids"],
        [
            [
                row["prompts"], row["mode"], f"{row['tokens_per_second']:.1f}",
                "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
                f"{row['prefill_seconds']:.3f}", f"{row['acceptance_length']:.2f}",
                "yes" if row["identical"] else f"no ({row['near_ties']} near ties)",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _chosen(options: dict[str, Any]) -> dict[str, list[Any]]:
    """Task -> its first prompts."""
    by_task: dict[str, list[Any]] = {}
    for prompt in read_prompts(options["prompts"]):
        many = by_task.setdefault(prompt.task, [])
        if len(many) < options["limit"]:
            many.append(prompt)
    unknown = sorted(set(options["sets"]) - set(by_task))
    if unknown:
        known = ", ".join(sorted(by_task))
        raise click.UsageError(f'No prompt set "{unknown[0]}". Known: {known}.')
    return {task: by_task[task] for task in options["sets"] or by_task}


def _lanes(
    opened: opening.Opened,
    modes: tuple[str, ...],
    drafters: tuple[str, ...],
    options: dict[str, Any],
) -> list[Any]:
    """Baseline first, then a lane for each mode and each drafter."""
    from spec_cli.measure import Lane
    from spec_core import Pair

    asked: list[tuple[str, str | None]] = [(mode, None) for mode in dict.fromkeys(modes)]
    asked += [("auto", drafter) for drafter in dict.fromkeys(drafters)]
    lanes = [Lane("baseline", Pair(opened.target, None, opened.tokenizer), None)]
    for mode, drafter in asked or [("auto", None)]:
        pair = opened.pair(wish_of(options, mode, drafter))
        cap = caps.caps_for(opened, pair, options | {"drafter": drafter}).make()
        name = names_of(pair.drafter)[0]
        if any(lane.mode == name for lane in lanes):
            name = f"{name} {Path(drafter).name}" if drafter else f"{name} ({mode})"
        lanes.append(Lane(name, pair, cap))
    return lanes
