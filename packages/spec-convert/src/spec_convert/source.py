"""Where GGUF bytes come from: a local file, read in rows on demand.

Rows are read, not mapped: memory stays at one chunk whatever the file's size. Knows nothing
about the meaning of the tensors.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from spec_convert.container import Container, TensorInfo, read_container
from spec_convert.errors import ConvertError, quote
from spec_convert.floats import to_float32

_MAX_VECTOR_BYTES = 1 << 20


class Source:
    """An open GGUF file; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            n_bytes = path.stat().st_size
        except OSError as error:
            raise ConvertError(
                f"[source] {quote(str(path))} must be a readable file: {error.strerror}."
            ) from error
        try:
            self.container: Container = read_container(self._file, n_bytes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

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
        self._file.seek(tensor.offset + start * tensor.row_bytes)
        if self._file.readinto(buffer.data) != buffer.nbytes:
            raise ConvertError(
                f"[source] {quote(str(self.path))} became shorter while it was read. "
                "Wait for the download to finish."
            )
        return buffer
