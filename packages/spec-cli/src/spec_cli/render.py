"""The only place that prints: answers to stdout, everything else to stderr."""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from spec_core import SpecError, Stats

_stderr = Console(stderr=True, highlight=False)
_stdout = Console(highlight=False)

_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n\r"}


def complain(message: str) -> None:
    """An error message, to stderr."""
    _tell(message)


def note(message: str) -> None:
    """A remark that is not part of the answer, to stderr."""
    _tell(message)


def stream(text: str) -> None:
    """A piece of the answer, at once."""
    if text:
        _write(text)


def end_stream() -> None:
    """The newline after an answer."""
    _write("\n")


def one_json(value: dict[str, Any]) -> None:
    """Exactly one JSON object to stdout; escaped where stdout has no such character."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    _write(text + "\n")


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table to stdout."""
    view = Table(
        title=Text(_shown(title)),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(Text(_shown(cell)) for cell in row))  # a name may look like markup
    if _stdout.is_terminal:
        with _output():
            _stdout.print(view)
    else:
        page = io.StringIO()  # which has no width to keep to, nor blanks at the ends of lines
        Console(file=page, highlight=False, width=10_000).print(view)
        lines([line.rstrip() for line in page.getvalue().splitlines()])


def interactive() -> bool:
    """Whether somebody types at a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison]


def ask(prompt: str) -> str | None:
    """One line from stdin without its end, asked for at a terminal alone; None at the end.

    Raises:
        SpecError: stdin is closed.
        UnicodeDecodeError: its bytes are no text.
    """
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise SpecError("[input] Standard input must be open, and is closed. Redirect it.")
    if interactive() and sys.stdout is not None and sys.stdout.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        with suppress(ImportError):
            import readline  # noqa: F401  makes input() edit lines and remember them; not on Windows
        try:
            return input(prompt)
        except EOFError:
            end_stream()
            return None
    if interactive():
        with suppress(OSError):
            click.echo(prompt, err=True, nl=False)
    line = sys.stdin.readline()
    return line.removesuffix("\n").removesuffix("\r") if line else None


def lines(items: list[str]) -> None:
    """Plain lines to stdout."""
    _write("".join(f"{item}\n" for item in items))


@contextmanager
def progress(title: str, unit: str = "bytes") -> Iterator[Any]:
    """A progress bar on stderr; yields a function (done, total). No unit: the time is shown."""
    name = TextColumn("{task.description}", markup=False)
    figures: tuple[ProgressColumn, ...] = (TimeElapsedColumn(),)
    if unit:
        count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        figures = (count, TimeRemainingColumn())
    with Progress(
        name,
        BarColumn(),
        *figures,
        console=_stderr,
        transient=True,
        disable=not _stderr.is_terminal,
        refresh_per_second=10 if unit else 1,  # what is measured is hardly disturbed
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def stats_line(stats: Stats, mode: str, drafter: str | None) -> str:
    """One line about a generation."""
    speed = f"{stats.tokens_per_second:.1f} tok/s"
    parts = [f"{stats.n_tokens} tokens", speed, f"prefill {stats.prefill_s:.2f} s", mode]
    if stats.n_drafted:
        parts.append(
            f"{stats.acceptance_length:.2f} tokens a round, "
            f"{stats.acceptance_rate:.0%} of {stats.n_drafted} drafts accepted"
        )
    elif drafter is not None:
        parts.append("no drafts")
    if stats.near_ties:
        parts.append(f"{stats.near_ties} near ties")
    return " · ".join(parts)


def _tell(message: str) -> None:
    with suppress(OSError):  # nobody reads stderr: the exit code has to do
        click.echo(_harmless(message, sys.stderr), err=True)


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _shown(text: str) -> str:
    """The text with a question mark for each character that stdout does not have."""
    encoding = _encoding()
    return _harmless(text.encode(encoding, "replace").decode(encoding), sys.stdout)


def _harmless(text: str, stream: Any) -> str:
    """At a terminal, control characters spelled out: a model's text must not command it."""
    return text.translate(_CONTROLS) if stream is not None and stream.isatty() else text


def _write(text: str) -> None:
    with _output():
        sys.stdout.write(_shown(text))
        sys.stdout.flush()


@contextmanager
def _output() -> Iterator[None]:
    """Around every write to stdout: says why it is refused, as on a full disk.

    Raises:
        SpecError: stdout is closed or takes no more.
        BrokenPipeError: the reader has gone.
    """
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise SpecError("[output] Standard output must be open, and is closed. Redirect it.")
    try:
        yield
    except OSError as error:
        _give_up_stdout()
        if isinstance(error, BrokenPipeError):
            raise
        raise SpecError(
            f"[output] Standard output must take the answer, and says: {error.strerror or error}."
        ) from error


def _give_up_stdout() -> None:
    """What it still holds goes nowhere: Python tries again at exit, and would end with 120."""
    with suppress(OSError, AttributeError, ValueError):  # not a real one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
