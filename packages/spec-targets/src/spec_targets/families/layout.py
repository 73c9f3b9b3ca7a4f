"""Families that are a stack of layers between a table and a head: the names of their parts."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_targets.taps import first_of

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts are, as dotted paths.

    Attributes:
        owner: From the model to the module that owns backbone and head; "" for the model itself.
        backbone: From the owner.
        layers: From the backbone to the list of layers.
        embedding: From the backbone.
        norm: From the backbone; None for a final norm without weights.
        head: From the owner; where the model has no such module, the embedding is the head.
        loops: Attribute of the backbone with the number of loops; None for one.
    """

    owner: str = ""
    backbone: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm: str | None = "norm"
    head: str = "lm_head"
    loops: str | None = None


class StackFamily:
    """A family with a layout and nothing else to say.

    Args:
        layout: Where its parts are; llama's without.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()

    def backbone(self, model: Any) -> nn.Module:
        """The module that turns ids into hidden states after the final norm, (B, T, H)."""
        return part(part(model, self.layout.owner), self.layout.backbone)

    def layers(self, model: Any) -> list[nn.Module]:
        """Decoder layer objects in the order they run; not a copy."""
        return part(self.backbone(model), self.layout.layers)

    def n_loops(self, model: Any) -> int:
        """How often one forward runs all layers."""
        loops = self.layout.loops
        return 1 if loops is None else part(self.backbone(model), loops)

    def between_loops(self, model: Any, hidden: mx.array) -> mx.array:
        """Nothing happens between loops."""
        return hidden

    def embedding(self, model: Any) -> nn.Module:
        """The token embedding table."""
        return part(self.backbone(model), self.layout.embedding)

    def stream(self, result: Any) -> mx.array:
        """What a layer returns, or the first part of it."""
        return first_of(result)

    def final(self, model: Any, result: Any) -> mx.array:
        """The final norm of the stream."""
        return self.norm(model, self.stream(result))

    def norm(self, model: Any, hidden: mx.array) -> mx.array:
        """The final norm."""
        if self.layout.norm is None:
            return mx.fast.rms_norm(hidden, None, _NORM_EPS)
        return part(self.backbone(model), self.layout.norm)(hidden)

    def raw_head(self, model: Any, hidden: mx.array) -> mx.array:
        """Logits without any transform; a model without a head of its own ties it to the table."""
        owner = part(model, self.layout.owner)
        if self.layout.head in owner:
            return owner[self.layout.head](hidden)
        table: Any = self.embedding(model)
        return table.as_linear(hidden)

    def prepare(self, model: Any) -> None:
        """Nothing to do: every row of these models stands alone already."""


def part(module: Any, path: str) -> Any:
    """Follow a dotted path of attributes; the module itself for an empty one."""
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module
