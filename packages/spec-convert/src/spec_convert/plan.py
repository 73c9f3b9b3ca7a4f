"""Decides, before any data is read, what every tensor becomes and where it goes.

Knows the tensor table and the naming rules; moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_convert.container import Container, TensorInfo
from spec_convert.errors import ConvertError, quote
from spec_convert.floats import F16, F32, PLAIN, FloatType
from spec_convert.names import Architecture, Slot
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


Storage = PackedStorage | FloatType


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
        shape = self.info.shape
        if isinstance(self.storage, FloatType):
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
    options: Options,
    wide_scales: Collection[str] = (),
) -> Plan:
    """Plan a conversion.

    Args:
        container: header of the source.
        architecture: naming rules; None keeps GGUF names.
        options: what the user asked for.
        wide_scales: GGUF names whose scales need float32.

    Returns:
        The plan; output names are unique.

    Raises:
        ConvertError: a tensor has no place, or a layer is missing.
    """
    planned: list[Planned] = []
    dropped: list[str] = []
    for info in container.tensors:
        slot = Slot(info.name)
        if architecture is not None:
            slot = architecture.slot(info.name, container.metadata)
        if slot is None:
            dropped.append(info.name)
            continue
        _check_heads(info, slot)
        storage = _storage(info, slot, options, info.name in wide_scales)
        tensor = Planned(info, slot, storage)
        if options.exact_only and isinstance(storage, PackedStorage) and not storage.exact:
            raise inexact(tensor)
        planned.append(tensor)
    names = Counter(entry.name for tensor in planned for entry in tensor.entries)
    for name, count in names.items():
        if count > 1:
            raise ConvertError(f"[plan] Output names must be unique, got {quote(name)} twice.")
    if architecture is not None:
        _check_layers(planned, container.metadata.integer(f"{architecture.name}.block_count"))
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
    if options.dtype is not None:
        return options.dtype
    if info.kind in PLAIN:
        return F32 if slot.shift else PLAIN[info.kind]
    layout = LAYOUTS.get(info.kind)
    is_matrix = len(info.shape) > 1 and slot.name.endswith(".weight")
    if layout is None or not is_matrix or slot.shift:
        return F32
    if wide:
        return PackedStorage(layout, F32)
    if options.small_scales:
        return PackedStorage(layout, F16, loose=True)
    # MLX reads embedding rows in the type of the scales: float16 would round the values.
    return PackedStorage(layout, F32 if slot.embedding or layout.wide else F16)


def inexact(tensor: Planned) -> ConvertError:
    """The refusal of a tensor that would be rounded."""
    return ConvertError(
        f"[convert] --exact-only keeps every value, got {quote(tensor.info.name)} of type "
        f"{tensor.info.kind.name}, which would be rounded. Leave the option out, or use "
        "--dtype f32."
    )


def _check_heads(info: TensorInfo, slot: Slot) -> None:
    n_rows = info.shape[max(0, len(info.shape) - 2)]
    if slot.interleaved_heads and (
        slot.interleaved_heads < 0 or n_rows % (2 * slot.interleaved_heads)
    ):
        raise ConvertError(
            f"[plan] Rows of {quote(info.name)} must be a multiple of twice the "
            f"{slot.interleaved_heads} heads, got {n_rows}. The file is damaged."
        )


def _check_layers(planned: Sequence[Planned], n_layers: int) -> None:
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
    first = parts.get(0, set())
    for index, found in parts.items():
        missing = sorted(first - found)
        if missing:
            name = quote(f"blk.{index}.{missing[0]}")
            raise ConvertError(f"[plan] The file must hold the tensor {name}, which is missing.")
