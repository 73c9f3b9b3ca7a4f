"""Families whose residual stream runs in several copies: what a drafter taps is their mean."""

from typing import Any

import mlx.core as mx

from spec_targets.compressed import watch_compressor
from spec_targets.families.layout import StackFamily
from spec_targets.sparse import attend_in_order


class HyperFamily(StackFamily):
    """A stack with hyper-connections whose layers return copies (B, T, hc, H) and their mix."""

    def stream(self, result: Any) -> mx.array:
        """The mean over the copies, in the stream's own type."""
        copies, _ = result
        return copies.mean(axis=2)

    def final(self, model: Any, result: Any) -> mx.array:
        """The copies collapsed by the last layer's mix, normed."""
        copies, mix = result
        collapsed = (mix[..., None] * copies.astype(mx.float32)).sum(axis=2)
        return self.norm(model, collapsed.astype(copies.dtype))

    def prepare(self, model: Any) -> None:
        """Let compressors note what a block feeds them, and few rows attend as one row does."""
        args = model.args
        for layer in self.layers(model):
            attention: Any = layer["self_attn"]
            selected = args.index_topk if attention.ratio else 0
            attend_in_order(attention, args.sliding_window, selected)
            if "compressor" in attention:
                watch_compressor(attention["compressor"])


HYPER: dict[str, StackFamily] = {"deepseek_v41": HyperFamily()}
