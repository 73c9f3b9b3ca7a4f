"""Compares a converted folder with the GGUF file it came from, value by value.

The source is dequantised by the `gguf` package; the output is read back by code that shares
nothing with the code that wrote it, except the naming rules. Knows nothing about the tokeniser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_convert.container import TensorInfo
from spec_convert.errors import ConvertError, quote
from spec_convert.floats import BY_NAME, PLAIN, decode, to_float32
from spec_convert.names import Slot, architecture_of
from spec_convert.source import Source
from spec_convert.tensorfile import Stored, TensorFolder, affine_values
from spec_convert.transfer import ErrorMeter, by_rows, row_ranges, source_rows

Array = np.ndarray[Any, Any]
_ROUNDING = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}
_TINY = {"F32": 0.0, "F16": 2.0**-25, "BF16": 2.0**-134}


@dataclass(frozen=True)
class Comparison:
    """One tensor of the source beside what the output holds.

    Attributes:
        source: GGUF name.
        target: name in the output.
        max_error: largest absolute difference.
        rms_error: root of the mean squared difference.
        within: every value is as close as its storage allows: equal where the layout is exact,
            and otherwise within rounding.
    """

    source: str
    target: str
    max_error: float
    rms_error: float
    within: bool


def verify(out: str | Path, source: str | Path) -> list[Comparison]:
    """Compare every tensor of a conversion with its source.

    Args:
        out: folder that `convert` wrote.
        source: the GGUF file.

    Returns:
        One comparison per tensor, in source order.

    Raises:
        ConvertError: a tensor is missing, left over or of another shape, or a file is unreadable.
    """
    folder = Path(out)
    with Source(Path(source)) as opened, TensorFolder(folder) as stored:
        metadata = opened.container.metadata
        renamed = (folder / "config.json").exists()
        architecture = architecture_of(metadata) if renamed else None
        left = set(stored.tensors)
        results: list[Comparison] = []
        for info in opened.container.tensors:
            slot = architecture.slot(info.name, metadata) if architecture else Slot(info.name)
            if slot is not None:
                results.append(_compare(opened, stored, info, slot, left))
    if left:
        raise ConvertError(
            f"[verify] The output must hold only the source's tensors, got {quote(min(left))} too. "
            "Name the file that the folder was converted from."
        )
    return results


def _compare(
    source: Source, folder: TensorFolder, info: TensorInfo, slot: Slot, left: set[str]
) -> Comparison:
    read, used = _reader(folder, info, slot)
    left -= used
    meter, within = ErrorMeter(), True
    view = by_rows(info)
    for start, stop in row_ranges(view, slot):
        wanted = to_float32(source_rows(source, view, slot, start, stop), info.kind)
        got, bound = read(start, stop)
        shifted = wanted.astype(np.float64) + slot.shift
        meter.add(shifted, got)
        with np.errstate(invalid="ignore"):
            close = np.abs(got - shifted) <= bound(np.abs(shifted))
        within = within and bool((close | (got == shifted) | np.isnan(shifted)).all())
    return Comparison(info.name, slot.name, meter.largest, meter.rms, within)


Reader = Callable[[int, int], tuple[Array, Callable[[Array], Array]]]


def _reader(folder: TensorFolder, info: TensorInfo, slot: Slot) -> tuple[Reader, set[str]]:
    """How to read rows of the output, and how far they may be from the source."""
    main = _find(folder, slot.name)
    if main.tag == "U32":
        module = slot.name.rpartition(".")[0]
        parts = {slot.name, f"{module}.scales", f"{module}.biases"}
        scales, biases = _find(folder, f"{module}.scales"), _find(folder, f"{module}.biases")
        _same_shape(info, slot.name, (*scales.shape[:-1], scales.shape[-1] * 32))

        def read_affine(start: int, stop: int) -> tuple[Array, Callable[[Array], Array]]:
            rows = (part.rows(start, stop) for part in (main, scales, biases))
            return affine_values(*rows), np.zeros_like

        return read_affine, parts
    _same_shape(info, slot.name, main.shape)
    column = info.kind in PLAIN and len(info.shape) == 1
    kind = next(kind for kind in BY_NAME.values() if kind.tag == main.tag)

    def read_floats(start: int, stop: int) -> tuple[Array, Callable[[Array], Array]]:
        rows = Stored(main.file, main.tag, (*main.shape, 1), main.offset) if column else main
        values = decode(rows.rows(start, stop), kind)
        return values, lambda size: size * _ROUNDING[main.tag] + _TINY[main.tag]

    return read_floats, {slot.name}


def _find(folder: TensorFolder, name: str) -> Stored:
    if name not in folder.tensors:
        raise ConvertError(
            f"[verify] The output must hold {quote(name)}, which is missing. "
            "Name the file that the folder was converted from."
        )
    return folder.tensors[name]


def _same_shape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> None:
    if shape != info.shape:
        raise ConvertError(
            f"[verify] {quote(name)} must have shape {info.shape}, got {shape}. "
            "Name the file that the folder was converted from."
        )
