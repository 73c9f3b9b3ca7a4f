"""Command line: `spec-convert convert`, `inspect` and `verify`.

Turns arguments into calls and results into text; every refusal is one line and exit code 1. The
group `cli` can be mounted in another click program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
import numpy as np

from spec_convert.convert import convert
from spec_convert.errors import ConvertError
from spec_convert.repack import HAS_LOOP
from spec_convert.report import Report
from spec_convert.source import Source
from spec_convert.verify import verify

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN_ITEMS = 6


def main() -> None:
    """Entry point of the `spec-convert` command; leaves nothing behind when terminated."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    cli(prog_name="spec-convert")


def _one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ConvertError as error:
            raise _Refusal(str(error)) from error

    return run


class _Refusal(click.ClickException):
    """A message that needs no word in front, as every refusal of `spec` is shown."""

    def show(self, file: Any = None) -> None:
        click.echo(self.message, err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    package_name="spec-convert",
    message=f"%(prog)s, version %(version)s, {'compiled loop' if HAS_LOOP else 'numpy alone'}",
)
def cli() -> None:
    """GGUF to safetensors for MLX, without losing a bit where the format allows it."""


@cli.command("convert", short_help="Convert a GGUF file to a folder.")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["f32", "f16", "bf16"]), help="Dequantise to this type.")
@click.option(
    "--scales",
    type=click.Choice(["exact", "f16"]),
    default="exact",
    help="f16 keeps all scales in 16 bits: smaller, and rounds those of K-quants.",
)
@click.option("--exact-only", is_flag=True, help="Refuse tensors that cannot be kept exactly.")
@click.option("--force", is_flag=True, help="Replace an earlier output.")
@click.option("--raw-names", is_flag=True, help="Keep GGUF tensor names; weights only.")
@click.option("--no-tokenizer", is_flag=True, help="Write no tokeniser files.")
@click.option("--report", "show_report", is_flag=True, help="Print one line per tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@_one_line_errors
def convert_command(
    source: str,
    out: Path,
    dtype: str | None,
    scales: str,
    exact_only: bool,
    force: bool,
    raw_names: bool,
    no_tokenizer: bool,
    show_report: bool,
    as_json: bool,
) -> None:
    """Convert the GGUF file SOURCE, or gguf:OWNER/REPOSITORY/FILE, to the new folder OUT."""
    with _ProgressBar() as bar:
        report = convert(
            source,
            out,
            dtype=dtype,
            scales=scales,
            exact_only=exact_only,
            force=force,
            raw_names=raw_names,
            tokenizer=not no_tokenizer,
            progress=bar.update,
        )
    if as_json:
        _say(json.dumps(report.to_json()))
        return
    if show_report:
        _echo_table(report)
    state = "lossless" if report.lossless else "rounded, see --report"
    _say(
        f"{report.out}: {len(report.tensors)} tensors, {report.bytes_before / 1e6:.1f} MB -> "
        f"{report.bytes_after / 1e6:.1f} MB, {state}, {report.seconds:.1f} s"
    )


@cli.command("inspect")
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_one_line_errors
def inspect_command(source: str, as_json: bool) -> None:
    """Show metadata and tensors of the GGUF file SOURCE."""
    with Source(source) as opened:
        container = opened.container
    tensors = [
        {"name": t.name, "type": t.kind.name, "shape": list(t.shape), "bytes": t.n_bytes}
        for t in container.tensors
    ]
    if as_json:
        values = {key: _plain(value) for key, value in container.metadata.values.items()}
        document = {"version": container.version, "alignment": container.alignment}
        _say(json.dumps(document | {"metadata": values, "tensors": tensors}))
        return
    _say(f"GGUF version {container.version}, {container.n_bytes} bytes")
    for key, value in container.metadata.values.items():
        _say(f"  {key} = {_brief(_plain(value))}")
    _say(f"{len(tensors)} tensors")
    for row in tensors:
        _say(f"  {row['name']}  {row['type']}  {row['shape']}  {row['bytes']} bytes")


@cli.command("verify")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("source")
@_one_line_errors
def verify_command(out: Path, source: str) -> None:
    """Compare every tensor of the folder OUT with the GGUF file SOURCE."""
    with _ProgressBar() as bar:
        results = verify(out, source, progress=bar.update)
    exact = sum(1 for result in results if result.max_error == 0)
    for result in results:
        if not result.within:
            _say(f"  {result.source}: off by up to {result.max_error:g}")
    _say(f"{len(results)} tensors compared, {exact} equal, {len(results) - exact} rounded")
    if not all(result.within for result in results):
        raise ConvertError("[verify] Every tensor must match its source. Convert again.")


class _ProgressBar:
    """A bar on stderr that appears with the first update, and only on a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._done = 0

    def update(self, done: int, total: int, name: str) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, file=sys.stderr)
            self._bar.__enter__()
        self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)


def _say(line: str) -> None:
    """A line to stdout.

    Raises:
        ConvertError: it takes no more, as on a full disk.
        BrokenPipeError: the reader has gone.
    """
    try:
        click.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # what it holds goes nowhere: Python tries again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ConvertError(
            f"[output] Standard output must take the report, and says: {error.strerror or error}."
        ) from error


def _echo_table(report: Report) -> None:
    _say("source\ttype\ttarget\tlayout\tbytes before\tbytes after\tmax error\trms error")
    for row in report.tensors:
        _say(
            f"{row.source}\t{row.source_type}\t{row.target}\t{row.layout}\t{row.bytes_before}\t"
            f"{row.bytes_after}\t{row.max_error:.3g}\t{row.rms_error:.3g}"
        )
    for name in report.dropped:
        _say(f"{name}\tdropped")


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _brief(value: object) -> str:
    if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
        head = ", ".join(json.dumps(item) for item in value[:_SHOWN_ITEMS])
        return f"[{head}, ...] ({len(value)} items)"
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
