"""Safetensors files written in place, and a folder that appears whole or not at all.

The header of a file is known before its data, so tensors stream to their final position. Knows
nothing about GGUF or models.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from spec_convert.errors import ConvertError, quote, quote_path

_SIZES = {
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "F64": 8,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}
_OURS = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map)\.json"
    r"|chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: its key.
        tag: safetensors dtype, such as "F16".
        shape: its shape.
    """

    name: str
    tag: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Length of its data."""
        return prod(self.shape) * _SIZES[self.tag]


class SafetensorsWriter:
    """One file whose tensors arrive in pieces, in any order; a context manager.

    Args:
        path: file to create.
        entries: everything the file will hold.
        metadata: string pairs for the header.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        # Widest type first keeps every tensor aligned without holes.
        ordered = sorted(entries, key=lambda entry: -_SIZES[entry.tag])
        header: dict[str, Any] = {"__metadata__": metadata}
        self._ends: dict[str, int] = {}
        end = 0
        for entry in ordered:
            start, end = end, end + entry.n_bytes
            header[entry.name] = {
                "dtype": entry.tag,
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        self._next = {entry.name: base + header[entry.name]["data_offsets"][0] for entry in ordered}
        self._ends = {entry.name: self._next[entry.name] + entry.n_bytes for entry in ordered}
        self._file = path.open("xb", buffering=0)
        self._write(struct.pack("<Q", len(text)) + text)

    def append(self, name: str, data: np.ndarray[Any, Any]) -> None:
        """Write the next piece of tensor `name`."""
        self._file.seek(self._next[name])
        self._write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        self._next[name] += data.nbytes

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None:
            assert self._next == self._ends, "a tensor was not written whole"


@contextmanager
def staged_folder(out: Path, force: bool) -> Iterator[Path]:
    """A new folder beside `out` that takes its place when the block ends without an error.

    Args:
        out: the folder to make.
        force: replace an earlier output.

    Yields:
        The temporary folder. It is removed when the block raises.

    Raises:
        ConvertError: `out` exists and may not be replaced, or its parent cannot be written.
    """
    check_target(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise ConvertError(
            f"[writer] {quote_path(out.parent)} must be a writable folder: {error.strerror}."
        ) from error
    try:
        yield staging
        _publish(staging, out)
    except OSError as error:
        raise ConvertError(
            f"[writer] {quote_path(out)} could not be written: {error.strerror or error}. "
            "Nothing was left behind."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(out: Path, force: bool) -> None:
    """Refuse an output path that holds something.

    Raises:
        ConvertError: `out` exists without `force`, or holds files this package does not write.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise ConvertError(f"[writer] {quote_path(out)} must be a folder, got a file.")
    held = sorted(item.name for item in out.iterdir())
    if not held:
        return
    if not force:
        raise ConvertError(
            f"[writer] {quote_path(out)} must not exist yet, got a folder with {len(held)} "
            "entries. Use --force to replace an earlier output."
        )
    foreign = [name for name in held if not _OURS.fullmatch(name)]
    if foreign:
        raise ConvertError(
            f"[writer] --force replaces only an earlier output, got a folder that also holds "
            f"{quote(foreign[0])}. Choose another folder."
        )


def _publish(staging: Path, out: Path) -> None:
    staging.chmod(0o755)
    if not out.exists():
        staging.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent)) / out.name
    out.rename(old)
    try:
        staging.rename(out)
    except OSError:
        old.rename(out)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)
