"""Multi-head latent attention: few rows attend in the latent space, as a single row does.

For one row the mlx-lm classes put the query into the latent space and attend there; for more rows
they expand the whole cached latent to keys and values per head. The two round differently, and the
second costs a pass over the context for every block. Here a forward of few rows takes the first.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from spec_targets.swap import Swaps, rebind

MOST_ROWS = 24  # wider forwards are prompt chunks, where expanding is cheaper


def attend_in_latent_space(attention: Any) -> None:
    """Let one attention module keep to the latent space for 2 to MOST_ROWS rows.

    Args:
        attention: A module whose forward calls `embed_q(latent, transpose=False)` for its keys,
            `unembed_out(latent)` for its values, then `scaled_dot_product_attention`.
    """
    swaps = Swaps()
    few: list[bool] = []  # not empty during a forward of few rows
    into = _pass_through(swaps, attention.embed_q, few)
    out_of = _pass_through(swaps, attention.unembed_out, few)

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **settings: Any) -> mx.array:
        if not few:
            return scaled_dot_product_attention(queries, keys, values, **settings)
        # Keys and values are the latent itself: both expansions were passed through.
        return out_of(scaled_dot_product_attention(into(queries), keys, values, **settings))

    methods: dict[str, Any] = dict(rebind(type(attention), "scaled_dot_product_attention", attend))
    original = methods["__call__"]

    def call(module: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if 1 < x.shape[1] <= MOST_ROWS:
            few.append(True)
        try:
            return original(module, x, *args, **kwargs)
        finally:
            few.clear()

    swaps.swap(attention, {**methods, "__call__": call})


def _pass_through(swaps: Swaps, projection: nn.Module, few: list[bool]):
    """Let a projection return its input during a forward of few rows; returns the real one."""
    original: Any = type(projection).__call__

    def call(module: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return x if few else original(module, x, *args, **kwargs)

    swaps.swap(projection, {"__call__": call})
    return lambda x: original(projection, x)
