"""What a tensor is called in a Hugging Face folder, and what changes on the way there.

Holds the form of the rules; the rules of each model family are in `families`. Knows nothing about
storage types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from spec_convert.errors import ConvertError, quote
from spec_convert.facts import Facts
from spec_convert.orders import Half, Order

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
Config = dict[str, Any]


class Change(Enum):
    """What happens to the values of a tensor."""

    NONE = auto()
    MINUS_ONE = auto()  # norms stored with their offset
    LOG_OF_NEGATIVE = auto()  # a decay stored as -exp(log)
    IDS_TO_OFFSETS = auto()  # token ids stored absolutely, wanted relative to their position


class Shape(Enum):
    """How the shape of a tensor changes."""

    SAME = auto()
    VECTOR = auto()  # all values on one axis
    ROW = auto()  # a vector becomes a matrix of one row
    TRAILING = auto()  # one more axis of length 1 at the end

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the output."""
        if self is Shape.TRAILING:
            return (*shape, 1)
        if self is Shape.ROW and len(shape) == 1:
            return (1, *shape)
        if self is Shape.VECTOR:
            n_values = 1
            for axis in shape:
                n_values *= axis
            return (n_values,)
        return shape


@dataclass(frozen=True)
class Slot:
    """Where one GGUF tensor goes.

    Attributes:
        name: parameter name in the output.
        rows: order the rows are in, if not the output's.
        columns: the same for columns; only whole groups of 32 move.
        change: what happens to the values.
        shape: what happens to the shape.
        embedding: a table that is also read row by row, not only multiplied.
        packed: the layer that owns it can hold quantised codes.
    """

    name: str
    rows: Order | None = None
    columns: Order | None = None
    change: Change = Change.NONE
    shape: Shape = Shape.SAME
    embedding: bool = False
    packed: bool = True

    def shape_of(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the output."""
        shape = self.shape.of(source)
        if isinstance(self.rows, Half):
            return (*shape[:-2], shape[-2] // 2, shape[-1])
        return shape


Adjust = Callable[[Slot, str, Facts], Slot | tuple[Slot, ...]]


def unadjusted(slot: Slot, part: str, facts: Facts) -> Slot:
    """The rule of an architecture that stores every tensor as the output wants it."""
    return slot


@dataclass(frozen=True)
class Architecture:
    """Rules of one GGUF architecture.

    Attributes:
        name: value of `general.architecture`, also the prefix of its metadata keys.
        top: GGUF name to output name, outside the layers; with or without a suffix.
        layer: the same inside a layer, without `blk.N.` and the output's layer prefix.
        config: writes `config.json`.
        adjust: completes the slot of a tensor, or divides it into several.
        layers: prefix of the layers in the output.
        uniform: all layers hold the same tensors.
        drafter: a speculative drafter: without a tokeniser of its own.
        dropped: GGUF names that carry nothing the output needs.
    """

    name: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    config: Callable[[Facts], Config]
    adjust: Adjust = unadjusted
    layers: str = "model.layers"
    uniform: bool = True
    drafter: bool = False
    dropped: frozenset[str] = field(default_factory=frozenset)

    def slots(self, tensor: str, facts: Facts) -> tuple[Slot, ...]:
        """Where `tensor` goes; nowhere when it carries nothing the output needs.

        Raises:
            ConvertError: the architecture has no such tensor.
        """
        match = _LAYER.fullmatch(tensor)
        if match and int(match[1]) >= facts.n_layers:
            return ()  # a multi-token-prediction block behind the model's own layers
        part = match[2] if match else tensor
        if part in self.dropped or (part == "output.weight" and facts.said_tied):
            return ()
        table = self.layer if match else self.top
        name = table.get(part)
        if name is None:
            stem, dot, suffix = part.rpartition(".")
            if stem not in table or not dot or suffix not in ("weight", "bias"):
                raise ConvertError(
                    f"[names] Architecture {quote(self.name)} has no tensor {quote(tensor)}. "
                    "Update spec-convert, or use --raw-names to keep GGUF names."
                )
            name = f"{table[stem]}.{suffix}"
        prefix = f"{self.layers}.{int(match[1])}." if match else ""
        slot = Slot(prefix + name, embedding=part.startswith("token_embd."))
        adjusted = self.adjust(slot, part, facts)
        return adjusted if isinstance(adjusted, tuple) else (adjusted,)
