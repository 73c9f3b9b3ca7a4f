"""The one error this package raises for a user's mistake or a file it cannot use.

Messages are one line of printable text, whatever the file that caused them holds.
"""

from __future__ import annotations

_SHOWN = 80


class ConvertError(ValueError):
    """A source, target or option cannot be used; the message says which and what to do."""


def quote(text: str) -> str:
    """Text from a file, made safe for a one-line message: escaped, shortened, in double quotes.

    Args:
        text: any string; control characters, quotes and line breaks are escaped.

    Returns:
        At most about 80 printable characters between double quotes.
    """
    return _printable(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


def quote_path(path: object) -> str:
    """As `quote`, but the end of a long path is kept: it names the file."""
    text = str(path)
    return _printable(text if len(text) <= _SHOWN else "..." + text[3 - _SHOWN :])


def _printable(shown: str) -> str:
    escaped = shown.encode("unicode_escape", "backslashreplace").decode("ascii")
    return '"' + escaped.replace('"', '\\"') + '"'
