"""Files that several processes may write at once."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or what was there before.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    handle, made = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(made).replace(path)
    except BaseException:  # an interrupt too leaves nothing behind
        Path(made).unlink(missing_ok=True)
        raise
