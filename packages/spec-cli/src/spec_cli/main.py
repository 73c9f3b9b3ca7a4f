"""The click group `spec`, and how an error becomes one to three lines and an exit code."""

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import click

from spec_cli import env
from spec_cli.commands.benchmark import benchmark
from spec_cli.commands.calibrate import calibrate
from spec_cli.commands.chat import chat
from spec_cli.commands.convert import convert
from spec_cli.commands.doctor import doctor
from spec_cli.commands.eval import evaluate
from spec_cli.commands.generate import generate
from spec_cli.commands.models import models
from spec_cli.commands.serve import serve
from spec_cli.render import complain, note


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-spec-cli", prog_name="spec")
def cli() -> None:
    """Speculative decoding on MLX: the target's own output, sooner."""


for command in (generate, chat, serve, benchmark, calibrate, evaluate, models, doctor, convert):
    cli.add_command(command)


def main() -> None:
    """Run the command line; exits 0 done, 1 refused, 2 usage."""
    env.prepare_mlx()
    warnings.showwarning = tell_warning
    sys.exit(run(sys.argv[1:]))


def tell_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning as a remark, without the line of code that it came from."""
    note(
        str(message) if issubclass(category, RuntimeWarning) else f"{category.__name__}: {message}"
    )


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; never raises for a user's mistake."""
    from spec_convert import ConvertError
    from spec_core import SpecError

    try:
        Path.cwd()
    except OSError:
        return _refused("[folder] The current folder must exist, and is gone. Go to another one.")
    try:
        # Without standalone mode click returns the code of an Exit instead of raising it.
        return cli.main(args=arguments, prog_name="spec", standalone_mode=False) or 0
    except click.Abort:
        complain("Stopped.")
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (SpecError, ConvertError) as error:
        return _refused(str(error))
    except BrokenPipeError:
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr.close()  # the reader has gone; nothing can be told to anybody
        return 1
    except KeyboardInterrupt:
        complain("Stopped.")
        return 130
    except Exception as error:  # a bug of ours: say so in one line, keep the traceback for asking
        return _refused(
            f"[bug] {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}\n"
            "Run again with SPEC_DEBUG=1 for the traceback, and please report it."
        )


def _refused(message: str) -> int:
    if env.debug():
        traceback.print_exc()
    complain(message)
    return 1
