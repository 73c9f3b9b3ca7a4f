"""Whether a folder that a conversion wrote is still whole; reads headers and last bytes only."""

from __future__ import annotations

import json
import struct
from pathlib import Path

_HEADER_LIMIT = 100_000_000


def is_complete(folder: str | Path) -> bool:
    """True when nothing of a written folder is missing or cut short.

    Finds what a full disk, a killed copy or a tidy-up leaves behind: absent files, files shorter or
    longer than they say themselves. Flipped bits inside a tensor are not found.

    Args:
        folder: the output of `convert`.
    """
    folder = Path(folder)
    weights = sorted(folder.glob("model*.safetensors"))
    documents = sorted(folder.glob("*.json"))
    if not weights or not (folder / "config.json").is_file():
        return False
    try:
        named = _named_weights(folder)
        return (
            named <= {path.name for path in weights}
            and all(_ends_well(path) for path in documents)
            and all(_is_as_long_as_it_says(path) for path in weights)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return False


def _named_weights(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _ends_well(document: Path) -> bool:
    """The writer ends each document with a brace and a newline."""
    with document.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 2, 0))
        return file.read() == b"}\n"


def _is_as_long_as_it_says(path: Path) -> bool:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_LIMIT:
            return False
        header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return file.seek(0, 2) == 8 + length + max(ends, default=0)
