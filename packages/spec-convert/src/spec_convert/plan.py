"""Decides, before any data is read, what every tensor becomes and where it goes.

Knows the tensor table and the naming rules; moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from spec_convert.container import Container, TensorInfo
from spec_convert.errors import ConvertError, quote
from spec_convert.facts import Facts
from spec_convert.floats import F16, F32, INTEGERS, PLAIN, FloatType
from spec_convert.names import Architecture, Change, Shape, Slot
from spec_convert.orders import Tiled
from spec_convert.repack import LAYOUTS, Layout
from spec_convert.writer import Entry


@dataclass(frozen=True)
class PackedStorage:
    """Codes with a scale, and mostly a bias, per group.

    Attributes:
        layout: where codes, scales and biases come from.
        scales: type of scales and biases.
        loose: they may be rounded to that type.
    """

    layout: Layout
    scales: FloatType
    loose: bool = False

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Numpy type of scales and biases."""
        return np.dtype("<f4" if self.scales is F32 else "<f2")

    @property
    def exact(self) -> bool:
        """Whether every value is kept."""
        return self.layout.exact and not (self.loose and self.layout.wide)

    def __str__(self) -> str:
        mode, bits, group = self.layout.mode, self.layout.bits, self.layout.group
        scales = f"{self.scales.tag} scales" if mode == "affine" else "8-bit scales"
        return f"{mode} {bits}-bit, group {group}, {scales}"


@dataclass(frozen=True)
class IntegerStorage:
    """Whole numbers.

    Attributes:
        tag: name of the type in a safetensors header.
    """

    tag: str


Storage = PackedStorage | FloatType | IntegerStorage


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        dtype: store every tensor as this type; None keeps quantised codes.
        exact_only: refuse a tensor that would be rounded.
        small_scales: keep all scales in float16, rounded where they must be.
    """

    dtype: FloatType | None = None
    exact_only: bool = False
    small_scales: bool = False


@dataclass(frozen=True)
class Planned:
    """One tensor's way from the source to the output.

    Attributes:
        info: where it is in the source.
        slot: where it goes and what changes.
        storage: how its values are kept.
    """

    info: TensorInfo
    slot: Slot
    storage: Storage

    @property
    def module(self) -> str:
        """Name of the layer that owns the parameter."""
        return self.slot.name.rpartition(".")[0]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Tensors written for it."""
        shape = self.slot.shape_of(self.info.shape)
        if not isinstance(self.storage, PackedStorage):
            return (Entry(self.slot.name, self.storage.tag, shape),)
        layout = self.storage.layout
        groups = (*shape[:-1], shape[-1] // layout.group)
        words = (*shape[:-1], shape[-1] * layout.bits // 32)
        weight = Entry(self.slot.name, "U32", words)
        if layout.mode != "affine":
            return weight, Entry(f"{self.module}.scales", "U8", groups)
        scales = self.storage.scales.tag
        return (
            weight,
            Entry(f"{self.module}.scales", scales, groups),
            Entry(f"{self.module}.biases", scales, groups),
        )

    @property
    def n_bytes_read(self) -> int:
        """Bytes of the source that it stands for."""
        n_values = prod(self.slot.shape_of(self.info.shape))
        return self.info.n_bytes * n_values // prod(self.info.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes written for it."""
        return sum(entry.n_bytes for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """Every tensor of a conversion.

    Attributes:
        tensors: what is written, in source order.
        dropped: GGUF names left out.
    """

    tensors: tuple[Planned, ...]
    dropped: tuple[str, ...]


def make_plan(
    container: Container,
    architecture: Architecture | None,
    facts: Facts | None,
    options: Options,
    wide: bool = False,
) -> Plan:
    """Plan a conversion.

    Args:
        container: header of the source.
        architecture: naming rules; None keeps GGUF names.
        facts: the same header for the rules; None without rules.
        options: what the user asked for.
        wide: keep all scales in float32.

    Returns:
        The plan; output names are unique.

    Raises:
        ConvertError: a tensor has no place, or a layer is missing.
    """
    planned: list[Planned] = []
    dropped: list[str] = []
    for info in container.tensors:
        slots = (Slot(info.name),)
        if facts is not None and architecture is not None:
            slots = architecture.slots(info.name, facts)
        if not slots:
            dropped.append(info.name)
        for slot in slots:
            storage = _storage(info, slot, options, wide)
            tensor = Planned(info, slot, storage)
            if slot.rows is not None:
                slot.rows.indices(info.with_rows().n_rows)
            if slot.columns is not None:
                slot.columns.indices(info.shape[-1])
            if options.exact_only and isinstance(storage, PackedStorage) and not storage.exact:
                raise inexact(tensor)
            planned.append(tensor)
    names = Counter(entry.name for tensor in planned for entry in tensor.entries)
    for name, count in names.items():
        if count > 1:
            raise ConvertError(f"[plan] Output names must be unique, got {quote(name)} twice.")
    if facts is not None and architecture is not None:
        _check_layers(planned, facts.n_layers, architecture.uniform)
    return Plan(tuple(planned), tuple(dropped))


def quantization_section(tensors: Sequence[Planned]) -> dict[str, Any] | None:
    """The "quantization" entry of `config.json`: the most used layout, and the exceptions.

    Args:
        tensors: the plan's tensors.

    Returns:
        None when nothing is quantised.
    """
    n_bytes: Counter[tuple[int, int, str]] = Counter()
    modules: dict[str, tuple[int, int, str]] = {}
    for tensor in tensors:
        if isinstance(tensor.storage, PackedStorage):
            layout = tensor.storage.layout
            modules[tensor.module] = (layout.group, layout.bits, layout.mode)
            n_bytes[modules[tensor.module]] += tensor.n_bytes
    if not n_bytes:
        return None
    usual = n_bytes.most_common(1)[0][0]
    others = {name: _settings(key) for name, key in modules.items() if key != usual}
    return _settings(usual) | others


def _settings(key: tuple[int, int, str]) -> dict[str, Any]:
    return {"group_size": key[0], "bits": key[1], "mode": key[2]}


def _storage(info: TensorInfo, slot: Slot, options: Options, wide: bool) -> Storage:
    if slot.change is Change.IDS_TO_OFFSETS and info.kind in INTEGERS:
        return IntegerStorage("I64")
    if info.kind in INTEGERS:
        return IntegerStorage(INTEGERS[info.kind])
    if options.dtype is not None:
        return options.dtype
    if info.kind in PLAIN:
        return PLAIN[info.kind] if slot.change is Change.NONE else F32
    layout = LAYOUTS.get(info.kind)
    if layout is None or not _can_hold_codes(info, slot, layout):
        return F32
    if wide:
        return PackedStorage(layout, F32)
    if options.small_scales:
        return PackedStorage(layout, F16, loose=True)
    # MLX reads embedding rows in the type of the scales: float16 would round the values.
    return PackedStorage(layout, F32 if slot.embedding or layout.wide else F16)


def _can_hold_codes(info: TensorInfo, slot: Slot, layout: Layout) -> bool:
    is_matrix = len(info.shape) > 1 and slot.name.endswith(".weight")
    whole_groups = not isinstance(slot.columns, Tiled) or slot.columns.width % layout.group == 0
    unchanged = slot.change is Change.NONE and slot.shape is Shape.SAME
    return is_matrix and slot.packed and whole_groups and unchanged


def inexact(tensor: Planned) -> ConvertError:
    """The refusal of a tensor that would be rounded."""
    return ConvertError(
        f"[convert] --exact-only keeps every value, got {quote(tensor.info.name)} of type "
        f"{tensor.info.kind.name}, which would be rounded. Leave the option out, or use "
        "--dtype f32."
    )


def _check_layers(planned: Sequence[Planned], n_layers: int, uniform: bool) -> None:
    parts: dict[int, set[str]] = {}
    for tensor in planned:
        if tensor.info.name.startswith("blk."):
            _, index, part = tensor.info.name.split(".", 2)
            parts.setdefault(int(index), set()).add(part)
    if len(parts) != n_layers or (parts and max(parts) != n_layers - 1):
        raise ConvertError(
            f"[plan] The file must hold {n_layers} layers, got tensors of {len(parts)}. "
            "It is one part of a split model, or damaged."
        )
    first = parts.get(0, set()) if uniform else set()
    for index, found in parts.items():
        missing = sorted(first - found)
        if missing:
            name = quote(f"blk.{index}.{missing[0]}")
            raise ConvertError(f"[plan] The file must hold the tensor {name}, which is missing.")
