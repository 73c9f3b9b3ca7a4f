"""The only place that prints: answers to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from spec_core import Stats

_stderr = Console(stderr=True, highlight=False)
_stdout = Console(highlight=False)


def complain(message: str) -> None:
    """An error message, to stderr."""
    click.echo(message, err=True)


def note(message: str) -> None:
    """A remark that is not part of the answer, to stderr."""
    click.echo(message, err=True)


def stream(text: str) -> None:
    """A piece of the answer, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def end_stream() -> None:
    """The newline after an answer."""
    sys.stdout.write("\n")
    sys.stdout.flush()


def one_json(value: dict[str, Any]) -> None:
    """Exactly one JSON object to stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table to stdout."""
    view = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*row)
    _stdout.print(view)


def lines(items: list[str]) -> None:
    """Plain lines to stdout."""
    for item in items:
        click.echo(item)


@contextmanager
def progress(title: str, unit: str = "bytes") -> Iterator[Any]:
    """A progress bar on stderr; yields a function (done, total)."""
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=_stderr, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def stats_line(stats: Stats, mode: str, drafter: str | None) -> str:
    """One line about a generation."""
    speed = f"{stats.tokens_per_second:.1f} tok/s"
    parts = [f"{stats.n_tokens} tokens", speed, f"prefill {stats.prefill_s:.2f} s", mode]
    if drafter is not None:
        parts.append(
            f"{stats.acceptance_length:.2f} tokens a round, "
            f"{stats.acceptance_rate:.0%} of {stats.n_drafted} drafts accepted"
        )
    if stats.near_ties:
        parts.append(f"{stats.near_ties} near ties")
    return " · ".join(parts)
