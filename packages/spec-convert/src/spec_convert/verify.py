"""Compares a converted folder with the GGUF file it came from, value by value.

The source is dequantised by the `gguf` package; the output is read back by code that shares
nothing with the code that wrote it, except the naming rules. Knows nothing about the tokeniser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spec_convert.container import TensorInfo
from spec_convert.errors import ConvertError, quote
from spec_convert.facts import Facts
from spec_convert.families import architecture_of
from spec_convert.floats import BY_NAME, INTEGERS, decode, to_float32, to_integers
from spec_convert.names import Change, Slot
from spec_convert.repack import LAYOUTS
from spec_convert.report import Progress
from spec_convert.source import Source
from spec_convert.tensorfile import Stored, TensorFolder, affine_values, block_float_values
from spec_convert.transfer import ErrorMeter, Rows, changed, reorder_columns

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


def verify(
    out: str | Path, source: str | Path, *, progress: Progress | None = None
) -> list[Comparison]:
    """Compare every tensor of a conversion with its source.

    Args:
        out: folder that `convert` wrote.
        source: the GGUF file.
        progress: called with bytes of the source compared, bytes in all, and the tensor's name.

    Returns:
        One comparison per tensor, in source order.

    Raises:
        ConvertError: a tensor is missing, left over or of another shape, or a file is unreadable.
    """
    folder = Path(out)
    with Source(source) as opened, TensorFolder(folder) as stored:
        container = opened.container
        renamed = (folder / "config.json").exists()
        architecture = architecture_of(container.metadata) if renamed else None
        facts = Facts(container, opened.vector)
        left = set(stored.tensors)
        results: list[Comparison] = []
        done, total = 0, sum(info.n_bytes for info in container.tensors)
        for info in container.tensors:
            slots = architecture.slots(info.name, facts) if architecture else (Slot(info.name),)
            results += [_compare(opened, stored, info, slot, left) for slot in slots]
            done += info.n_bytes
            if progress is not None:
                progress(done, total, info.name)
    if left:
        raise ConvertError(
            f"[verify] The output must hold only the source's tensors, got {quote(min(left))} too. "
            "Name the file that the folder was converted from."
        )
    return results


def _compare(
    source: Source, folder: TensorFolder, info: TensorInfo, slot: Slot, left: set[str]
) -> Comparison:
    rows = Rows(source, info, slot)
    read, used = _reader(folder, info, slot, rows)
    left -= used
    meter, within = ErrorMeter(), True
    for start, stop, raw in rows.chunks():
        wanted = _wanted(raw, start, info, slot)
        got, bound = read(start, stop)
        meter.add(wanted, got)
        with np.errstate(invalid="ignore"):
            close = np.abs(got - wanted) <= bound(np.abs(wanted))
        within = within and bool((close | (got == wanted) | np.isnan(wanted)).all())
    return Comparison(info.name, slot.name, meter.largest, meter.rms, within)


def _wanted(raw: Array, start: int, info: TensorInfo, slot: Slot) -> Array:
    if slot.change is Change.IDS_TO_OFFSETS and info.kind in INTEGERS:
        ids = to_integers(raw, info.kind)
        return ids - np.arange(start, start + ids.size).reshape(ids.shape)
    values = changed(to_float32(raw, info.kind), slot.change).astype(np.float64)
    return reorder_columns(values, slot.columns)


Bound = Callable[[Array], Array]
Reader = Callable[[int, int], tuple[Array, Bound]]


def _reader(
    folder: TensorFolder, info: TensorInfo, slot: Slot, rows: Rows
) -> tuple[Reader, set[str]]:
    """How to read rows of the output, and how far they may be from the source."""
    main = _find(folder, slot.name)
    if main.tag == "U32":
        return _packed_reader(folder, info, slot)
    _same_shape(slot.name, slot.shape_of(info.shape), main.shape)
    flat = replace(main, shape=(rows.n_rows, prod(main.shape) // rows.n_rows))
    kind = {kind.tag: kind for kind in BY_NAME.values()}.get(main.tag)

    if kind is None:
        return lambda start, stop: (flat.rows(start, stop), np.zeros_like), {slot.name}
    share = _ROUNDING[main.tag] + (2.0**-22 if slot.change is Change.LOG_OF_NEGATIVE else 0.0)

    def read(start: int, stop: int) -> tuple[Array, Bound]:
        values = decode(flat.rows(start, stop), kind)
        return values, lambda size: size * share + _TINY[main.tag]

    return read, {slot.name}


def _packed_reader(folder: TensorFolder, info: TensorInfo, slot: Slot) -> tuple[Reader, set[str]]:
    module = slot.name.rpartition(".")[0]
    main, scales = _find(folder, slot.name), _find(folder, f"{module}.scales")
    group = info.shape[-1] // max(1, scales.shape[-1])
    found = (*scales.shape[:-1], scales.shape[-1] * group)
    _same_shape(slot.name, slot.shape_of(info.shape), found)
    if scales.tag == "U8":

        def read_floats(start: int, stop: int) -> tuple[Array, Bound]:
            words = main.rows(start, stop)
            return block_float_values(words, scales.rows(start, stop), group), np.zeros_like

        return read_floats, {slot.name, f"{module}.scales"}
    biases = _find(folder, f"{module}.biases")
    layout = LAYOUTS.get(info.kind)
    exact = layout and layout.exact and not (layout.wide and scales.tag == "F16")

    def read_affine(start: int, stop: int) -> tuple[Array, Bound]:
        parts = [part.rows(start, stop) for part in (main, scales, biases)]
        values = affine_values(parts[0], parts[1], parts[2], group)
        if layout is None or exact:
            return values, np.zeros_like
        scale, bias = (
            np.repeat(np.abs(part, dtype=np.float64), group, axis=1) for part in parts[1:]
        )
        most = (1 << layout.bits) - 1
        if not layout.exact:
            return values, lambda size: scale * (0.5 + 2.0**-12) + size * 2.0**-22
        rounding = (scale * most + bias) * 2.0**-11 + (most + 1) * 2.0**-25
        return values, lambda size: rounding + size * 2.0**-22

    return read_affine, {slot.name, f"{module}.scales", f"{module}.biases"}


def _find(folder: TensorFolder, name: str) -> Stored:
    if name not in folder.tensors:
        raise ConvertError(
            f"[verify] The output must hold {quote(name)}, which is missing. "
            "Name the file that the folder was converted from."
        )
    return folder.tensors[name]


def _same_shape(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
    if found != wanted:
        raise ConvertError(
            f"[verify] {quote(name)} must have shape {wanted}, got {found}. "
            "Name the file that the folder was converted from."
        )
