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
from spec_convert.floats import BF16, F16, F32, PLAIN, FloatType
from spec_convert.names import Architecture, Slot
from spec_convert.repack import GROUP, LAYOUTS
from spec_convert.writer import Entry


@dataclass(frozen=True)
class AffineStorage:
    """Codes with a scale and a bias per group.

    Attributes:
        bits: width of a code.
        scales: type of scales and biases.
    """

    bits: int
    scales: FloatType

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Numpy type of scales and biases."""
        return np.dtype("<f4" if self.scales is F32 else "<f2")

    def __str__(self) -> str:
        return f"affine {self.bits}-bit, group {GROUP}, {self.scales.tag} scales"


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
    storage: AffineStorage | FloatType

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
        groups = (*shape[:-1], shape[-1] // GROUP)
        words = (*shape[:-1], shape[-1] * self.storage.bits // 32)
        scales = self.storage.scales.tag
        return (
            Entry(self.slot.name, "U32", words),
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
    dtype: FloatType | None,
    wide_scales: Collection[str] = (),
) -> Plan:
    """Plan a conversion.

    Args:
        container: header of the source.
        architecture: naming rules; None keeps GGUF names.
        dtype: store every tensor as this type; None keeps quantised codes.
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
        storage = _storage(info, slot, dtype, info.name in wide_scales)
        planned.append(Planned(info, slot, storage))
    names = Counter(entry.name for tensor in planned for entry in tensor.entries)
    for name, count in names.items():
        if count > 1:
            raise ConvertError(f"[plan] Output names must be unique, got {quote(name)} twice.")
    if architecture is not None:
        _check_layers(planned, container.metadata.integer(f"{architecture.name}.block_count"))
    return Plan(tuple(planned), tuple(dropped))


def quantization_section(tensors: Sequence[Planned]) -> dict[str, Any] | None:
    """The "quantization" entry of `config.json`: the most used width, and the exceptions.

    Args:
        tensors: the plan's tensors.

    Returns:
        None when nothing is quantised.
    """
    weight: Counter[int] = Counter()
    for tensor in tensors:
        if isinstance(tensor.storage, AffineStorage):
            weight[tensor.storage.bits] += tensor.n_bytes
    if not weight:
        return None
    usual = weight.most_common(1)[0][0]
    section = _settings(usual)
    for tensor in tensors:
        if isinstance(tensor.storage, AffineStorage) and tensor.storage.bits != usual:
            section[tensor.module] = _settings(tensor.storage.bits)
    return section


def _settings(bits: int) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": "affine"}


def _storage(
    info: TensorInfo, slot: Slot, dtype: FloatType | None, wide: bool
) -> AffineStorage | FloatType:
    if dtype is not None:
        return dtype
    if info.kind in PLAIN:
        return F32 if slot.shift else PLAIN[info.kind]
    is_matrix = len(info.shape) > 1 and slot.name.endswith(".weight")
    if info.kind in LAYOUTS and is_matrix and not slot.shift:
        # MLX reads embedding rows in the type of the scales: float16 would round the values.
        scales = F32 if slot.embedding or wide else F16
        return AffineStorage(LAYOUTS[info.kind].bits, scales)
    return BF16


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
