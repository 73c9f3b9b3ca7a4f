"""The tensors of safetensors files, by name, read only when and where they are wanted.

What a file holds is read from its header; its data stays on disk until a tensor is asked for, and
can be given up again. Knows nothing about names or what tensors mean.

References:
    safetensors format: 8 bytes of header length, the header as JSON, then the data.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from spec_core import LoadError
from spec_core.weightfile import read_header


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor, as a header describes it.

    Attributes:
        path: The file.
        name: Its name there.
        kind: The format's name of its type, such as "BF16" or "F8_E4M3".
        shape: As stored.
        nbytes: Bytes of data.
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


class Shards(Mapping[str, mx.array]):
    """Lazily read tensors of one or many files.

    Args:
        stored: Where each tensor is, by the name it is asked for.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = dict(stored)
        self._open: dict[Path, dict[str, mx.array]] = {}

    def __getitem__(self, name: str) -> mx.array:
        at = self.stored[name]
        if at.path not in self._open:
            self._open[at.path] = _load(at.path)
        return self._open[at.path][at.name]

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def release(self) -> None:
        """Give up what was read; a tensor asked for again is read again."""
        self._open.clear()


def read_headers(paths: Iterable[Path]) -> list[Stored]:
    """What some files hold; reads their headers and nothing else.

    Raises:
        LoadError: a file is not safetensors, or shorter than its header says.
    """
    return [stored for path in paths for stored in _header(path)]


def _load(path: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        raise LoadError(
            f'[load] "{path.name}" must hold tensors of types that MLX reads, got: {error}. '
            "Use another export of the drafter."
        ) from error
    return loaded  # pyright: ignore[reportReturnType]


def _header(path: Path) -> list[Stored]:
    try:
        return [_stored(path, name, entry) for name, entry in read_header(path).items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f'[load] "{path.name}" must be a whole safetensors file, got a header that cannot be '
            f"read ({type(error).__name__}). Download it again."
        ) from error


def _stored(path: Path, name: str, entry: Mapping[str, list[int]]) -> Stored:
    start, end = entry["data_offsets"]
    return Stored(path, name, str(entry["dtype"]), tuple(map(int, entry["shape"])), end - start)
