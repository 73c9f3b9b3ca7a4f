"""Whether a file is a whole safetensors file, told before anything is read of its data.

Downloads leave pointers, error pages and halves under a weight file's name; the refusal says which.
Knows the container, not what is in it.
"""

import json
import struct
from pathlib import Path
from typing import Any

from spec_core.errors import LoadError


def check_weight_file(path: Path) -> None:
    """Refuse a file that is not a whole safetensors file; see `read_header`."""
    read_header(path)


def read_header(path: Path) -> dict[str, Any]:
    """What a safetensors file says it holds: the format's entry of each tensor. Reads no data.

    Raises:
        LoadError: it cannot be read, is something else, cut short, or names a tensor twice.
    """
    try:
        return _read(path)
    except OSError as error:  # a link to nowhere, a folder
        raise LoadError(
            f'[load] "{path.name}" must be a file that can be read, got: {error.strerror}. '
            "Download it again."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if length + 8 > size or start[8:9] not in (b"{", b" "):
            raise LoadError(
                f'[load] "{path.name}" must be a safetensors file, got {size} bytes that look like '
                f"{looks_like(start)}. Download it again."
            )
        file.seek(8)
        tensors, problem = _parsed(file.read(length), size - 8 - length)
    if problem is not None:
        raise LoadError(
            f'[load] "{path.name}" must be a whole safetensors file, got {problem}. '
            "Download it again."
        )
    return tensors


def looks_like(start: bytes) -> str:
    """What a file is, by its first bytes, that is not what its name says."""
    if not start.strip(b"\0"):
        return "an empty or zeroed file"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    if start.lstrip()[:1] == b"<":
        return "an HTML page"
    if start.startswith(b"GGUF"):
        return "a GGUF file"
    return "a cut or damaged file"


def _parsed(header: bytes, n_data: int) -> tuple[dict[str, Any], str | None]:
    """The entries of a header in front of so many bytes of data, and what is wrong, or None."""
    twice: list[str] = []

    def gathered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                twice.append(name)
            found[name] = value
        return found

    try:
        tensors = json.loads(header, object_pairs_hook=gathered)
        tensors.pop("__metadata__", None)
        ends = {name: t["data_offsets"][1] for name, t in tensors.items()}
        late = [name for name, end in ends.items() if end > n_data]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return {}, f"a header that cannot be read ({type(error).__name__})"
    if twice:
        return {}, f'"{twice[0]}" twice'
    if late:
        return {}, f'{n_data} bytes of data where "{late[0]}" ends at {ends[late[0]]}'
    return tensors, None
