"""What a GGUF file says about its model: typed keys under the architecture's prefix.

A thin view over the header that also reads small tensors which configurations need. Knows
nothing about output names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from spec_convert.container import Container
from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata


@dataclass(frozen=True)
class Facts:
    """A model's header.

    Attributes:
        container: header of the file.
        vector: reads a small tensor by GGUF name as floats.
    """

    container: Container
    vector: Callable[[str], list[float]]

    @property
    def metadata(self) -> Metadata:
        """All keys of the file."""
        return self.container.metadata

    @cached_property
    def arch(self) -> str:
        """Value of `general.architecture`."""
        return self.metadata.text("general.architecture")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Row-major shape of every tensor."""
        return {tensor.name: tensor.shape for tensor in self.container.tensors}

    @property
    def said_tied(self) -> bool:
        """Whether the file says that the embedding is the output matrix too, present or not."""
        return self.metadata.flag(self.key("tie_word_embeddings"), False)

    def key(self, name: str) -> str:
        """The full metadata key of an architecture's setting."""
        return f"{self.arch}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        """Whole number of the architecture; required without a default."""
        if default is None:
            return self.metadata.integer(self.key(name))
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        """Number of the architecture, as the decimal it was written from."""
        if default is None:
            value = self.metadata.number(self.key(name))
        else:
            value = self.metadata.number(self.key(name), default)
        return float(f"{value:.7g}")

    def any_layer(self, name: str, default: int | None = None) -> int:
        """A whole number that may be stated per layer: the first that is not 0."""
        if isinstance(self.metadata.values.get(self.key(name)), (int, type(None))):
            return self.integer(name, default)
        stated = self.metadata.integers(self.key(name))
        return next((value for value in stated if value), default or 0)

    def per_layer(self, name: str) -> list[int]:
        """A whole number that may be stated once or per layer; one entry per layer."""
        value = self.metadata.values.get(self.key(name))
        if isinstance(value, int):
            return [self.integer(name)] * self.n_layers
        found = self.metadata.integers(self.key(name))
        if len(found) < self.n_layers:
            raise ConvertError(
                f'[config] "{self.key(name)}" must have {self.n_layers} entries, '
                f"got {len(found)}. The file is damaged."
            )
        return found[: self.n_layers]

    @cached_property
    def n_layers(self) -> int:
        """Decoder layers, without multi-token-prediction blocks behind them."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 1 <= count <= len(self.container.tensors):
            raise ConvertError(
                f'[config] "{self.key("block_count")}" must be 1 to the number of tensors, '
                f"got {count}. The file is damaged."
            )
        return count
