"""The option --plot, and what can go wrong with its file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from spec_cli import render
from spec_core import SpecError

plot_option = click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the result into a .png or .svg file."
)


def check_plot(plot: Path | None) -> None:
    """Refuse a plot that could not be written before anything is measured."""
    if plot is None:
        return
    if plot.suffix.lower() not in (".png", ".svg"):
        raise click.UsageError(f'--plot must end in .png or .svg, got "{plot.name}".')
    if not plot.absolute().parent.is_dir():
        raise click.UsageError(f'The folder of --plot must exist, got "{plot}".')


def draw(save: Callable[..., None], what: Any, plot: Path, title: str) -> None:
    """Draw `what` into a file with one of the functions of `spec_calibrate.plot`."""
    try:
        save(what, plot, title=title)
    except ImportError as error:
        raise SpecError(str(error)) from None
    except OSError as error:
        raise SpecError(f'[plot] "{plot}" cannot be written: {error}.') from None
    render.note(f"plot: {plot}")
