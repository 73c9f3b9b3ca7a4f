"""What a conversion did, tensor by tensor.

Plain data; knows nothing about how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[int, int, str], None]
"""Told of work on a source: bytes done, bytes in all, the tensor's name."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the source.

    Attributes:
        source: GGUF name.
        target: name in the output, without `.weight` replaced.
        source_type: GGUF storage type.
        layout: how it is stored, such as "affine 4-bit group 32, F16 scales" or "F32".
        shape: row-major shape.
        bytes_before: bytes in the source.
        bytes_after: bytes in the output.
        max_error: largest absolute difference from the source's own values; 0 where lossless.
        rms_error: root of the mean squared difference.
    """

    source: str
    target: str
    source_type: str
    layout: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    max_error: float
    rms_error: float


@dataclass(frozen=True)
class Report:
    """A finished conversion.

    Attributes:
        out: folder that was written.
        architecture: value of `general.architecture`.
        tensors: one entry per tensor written.
        dropped: GGUF names that have no place in the output.
        seconds: wall time.
    """

    out: Path
    architecture: str
    tensors: tuple[TensorReport, ...]
    dropped: tuple[str, ...]
    seconds: float

    @property
    def lossless(self) -> bool:
        """Whether every value in the output equals the source's."""
        return all(tensor.max_error == 0 for tensor in self.tensors)

    @property
    def bytes_before(self) -> int:
        """Bytes of tensor data read."""
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of tensor data written."""
        return sum(tensor.bytes_after for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "out": str(self.out),
            "architecture": self.architecture,
            "lossless": self.lossless,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": self.seconds,
            "dropped": list(self.dropped),
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
