"""`spec calibrate`: what rounds cost on this machine, and the cap that follows from it."""

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
    wish_of,
)
from spec_cli.commands.plots import check_plot, draw, plot_option


@click.command(short_help="Measure what drafts cost here.")
@model_options
@click.option("--mode", type=click.Choice(MODES[:-1]), default="auto", show_default=True)
@drafter_option
@drafter_options
@plot_option
@click.option("--clear", is_flag=True, help="Forget every stored calibration instead.")
@click.option("--cached", is_flag=True, help="Show the stored calibration if there is one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def calibrate(plot: Path | None, clear: bool, cached: bool, as_json: bool, **options: Any) -> None:
    """Measure verify, draft and overhead for a model and its drafter, and keep the result."""
    if clear and (cached or plot is not None):
        raise click.UsageError("--clear shows nothing; leave --cached and --plot out.")
    if clear:
        n_gone, folder = caps.store().clear(), str(caps.store().folder)
        if as_json:
            render.one_json({"cleared": n_gone, "folder": folder})
        else:
            render.lines([f"{n_gone} calibrations deleted from {folder}"])
        return
    check_plot(plot)
    refuse_unused(options, options["mode"])
    opened = open_target(options)
    pair = opened.pair(wish_of(options, options["mode"], options["drafter"]))
    found = caps.calibration_of(opened, pair, options, anew=not cached)
    mode, drafter = names_of(pair.drafter)
    title = f"{opened.name}, {drafter or mode}"
    if plot is not None:
        from spec_calibrate.plot import save_plot

        draw(save_plot, found.curves, plot, f"{title} on {found.key.device}")
    if as_json:
        render.one_json(found.to_json())
    else:
        _show(title, found)


def _show(title: str, found: Any) -> None:
    """The table: a row per cap."""
    from spec_calibrate.samples import UNKNOWN_NOISE

    data, curves = found.to_json(), found.curves
    depth, verify = curves.verify[0]
    source = curves.source
    rows = [
        [
            str(cap),
            f"{verify(cap + 1) * 1e3:.2f}",
            f"{curves.draft_s(cap, source) * 1e3:.2f}" if cap else "",
            f"{curves.round_s(cap, depth, source) * 1e3:.2f}",
            f"{gain:.2f}",
            "chosen" if cap == data["chosen_cap"] else "",
        ]
        for cap, gain in enumerate(data["speedup_by_cap"])
    ]
    columns = ["cap", "verify ms", "draft ms", "round ms", "expected speed-up", ""]
    render.table(f"{title}: context of {depth} tokens", columns, rows)
    acceptance = ", ".join(f"{rate:.2f}" for rate in curves.acceptance) or "typical, 0.70"
    lines = [
        f"acceptance by position: {acceptance}",
        f"knee of the verify: {data['knee'] or 'none'}; overhead {data['overhead_ms']:.2f} ms; "
        f"spread {'unknown' if curves.noise == UNKNOWN_NOISE else f'{curves.noise:.0%}'}",
        f"{'stored' if found.cached else 'measured'} {found.created} for {found.key.device}, "
        f"key {found.key.digest}",
    ]
    render.lines(lines)
