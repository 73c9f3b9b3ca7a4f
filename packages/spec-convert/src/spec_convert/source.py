"""Where GGUF bytes come from: a local file or all parts of a split one, read in rows on demand.

Rows are read, not mapped: memory stays at one chunk whatever the file's size. Knows nothing
about the meaning of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from spec_convert.container import Container, TensorInfo, check_names, read_container
from spec_convert.errors import ConvertError, quote, quote_path
from spec_convert.floats import to_float32
from spec_convert.hub import locate, part_names

_MAX_VECTOR_BYTES = 1 << 20
_MAX_PARTS = 10_000


class Source:
    """An open GGUF file, with its other parts where it is split; a context manager.

    Args:
        source: a path, or `gguf:<repo or folder>/<file>`; any part of a split file.

    Attributes:
        container: header of the file; of a split file, the first header with all tensors.

    Raises:
        ConvertError: a file or part is missing, unreadable or damaged.
    """

    def __init__(self, source: str | Path) -> None:
        path = locate(source)
        names = part_names(path.name)
        if len(names) > _MAX_PARTS:
            raise ConvertError(
                f"[source] A file has at most {_MAX_PARTS} parts, got {len(names)} in its name."
            )
        self._files: list[FileIO] = []
        with ExitStack() as stack:
            parts = [self._open(path.parent / name, stack) for name in names]
            self.container = _joined(parts, names)
            self._stack = stack.pop_all()

    def _open(self, path: Path, stack: ExitStack) -> Container:
        try:
            file = stack.enter_context(path.open("rb"))
            n_bytes = path.stat().st_size
        except OSError as error:
            raise ConvertError(
                f"[source] {quote_path(path)} must be a readable file: {error.strerror}."
            ) from error
        self._files.append(file.raw)  # rows come in large pieces: no second buffer
        return read_container(file, n_bytes)

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def vector(self, name: str) -> list[float]:
        """All values of a small tensor.

        Args:
            name: GGUF name of a tensor in `container`.

        Returns:
            Its values in order.

        Raises:
            ConvertError: the tensor is too large to be part of a configuration.
        """
        tensor = next(tensor for tensor in self.container.tensors if tensor.name == name)
        if tensor.n_bytes > _MAX_VECTOR_BYTES:
            raise ConvertError(
                f"[source] Tensor {quote(name)} must be a short list of numbers, got "
                f"{tensor.n_bytes} bytes. The file is damaged."
            )
        values = to_float32(self.rows(tensor, 0, tensor.n_rows), tensor.kind)
        return [float(value) for value in values.reshape(-1)]

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Raw rows of a tensor.

        Args:
            tensor: an entry of `container.tensors`.
            start: first row.
            stop: one past the last row.

        Returns:
            Shape (stop - start, row bytes), uint8, writable.

        Raises:
            ConvertError: the file became shorter since it was opened.
        """
        buffer = np.empty((stop - start, tensor.row_bytes), np.uint8)
        file = self._files[tensor.part]
        file.seek(tensor.offset + start * tensor.row_bytes)
        rest = memoryview(buffer.reshape(-1))
        while rest:
            n_read = file.readinto(rest)
            if not n_read:
                raise ConvertError(
                    f"[source] {quote_path(file.name)} became shorter while it was read. "
                    "Wait for the download to finish."
                )
            rest = rest[n_read:]
        return buffer


def _joined(parts: Sequence[Container], names: Sequence[str]) -> Container:
    """The first header with the tensors of all parts."""
    first = parts[0]
    stated = first.metadata.integer("split.count", 1)
    if stated > 1 and stated != len(parts):
        raise ConvertError(
            f"[source] {quote(names[0])} says it is one of {stated} parts, got {len(parts)} by its "
            "name. Give every part its original name, as in model-00001-of-00003.gguf."
        )
    for index, part in enumerate(parts):
        number = part.metadata.integer("split.no", index)
        if number != index:
            raise ConvertError(
                f"[source] {quote(names[index])} must be part {index + 1}, got part {number + 1}. "
                "Give every part its original name."
            )
    tensors = tuple(
        replace(tensor, part=index) for index, part in enumerate(parts) for tensor in part.tensors
    )
    wanted = first.metadata.integer("split.tensors.count", len(tensors))
    if stated > 1 and wanted != len(tensors):
        raise ConvertError(
            f"[source] The parts must hold {wanted} tensors, got {len(tensors)}. "
            "Download all parts of one version."
        )
    check_names(tensors)
    return replace(first, tensors=tensors, n_bytes=sum(part.n_bytes for part in parts))
