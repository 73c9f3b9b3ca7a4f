"""Where the command `spec` begins, before anything heavy is imported: Ctrl-C is quiet then too.

Knows nothing about commands.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import Any


class _Ended(SystemExit):
    """Another process asked this one to end."""


def main() -> None:
    """Run the command line; exits 0 done, 1 refused, 2 usage, 130 stopped by Ctrl-C."""
    _fill_streams()
    signal.signal(signal.SIGTERM, _end)
    sys.unraisablehook = _not_lost
    try:
        from spec_cli.main import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr.write("Stopped.\n")
        sys.exit(130)
    except _Ended:  # files in the making are removed; now as if nobody had caught it
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
                stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _fill_streams() -> None:
    """Where a standard stream is closed, its number must not go to a file of weights."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _end(number: int, frame: Any) -> None:
    raise _Ended(128 + number)


def _not_lost(found: Any) -> None:
    """A Ctrl-C that arrived in a finaliser, which ignores it, arrives once more after it."""
    if found.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident  # where it also ends a call that waits
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(found)
