"""DeepSeek-V4.1's sparse attention with a row's keys in the same places at any block width.

The mlx-lm class gives every row as many places for keys as its whole block needs, and the selected
groups in no order: a row's sums then run in another order beside other rows. Here few rows get all
places there can be, keys in order and empty places last.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.deepseek_v41 import _sparse_attention  # pyright: ignore[reportPrivateUsage]

from spec_targets.latent import MOST_ROWS
from spec_targets.swap import Swaps, rebind

_EMPTY = 2**31 - 1


def attend_in_order(attention: Any, window: int, n_selected: int) -> None:
    """Let one attention module place keys by what they are, for up to MOST_ROWS rows.

    Args:
        attention: A module whose forward calls `_sparse_attention`.
        window: Places for rows of the sliding window.
        n_selected: Places for selected groups; 0 where the layer selects none.
    """

    def attend(
        q: mx.array, kvs: list[mx.array], indices: list[mx.array], **settings: Any
    ) -> mx.array:
        if q.shape[1] > MOST_ROWS:
            return _sparse_attention(q, kvs, indices, **settings)
        if n_selected and len(kvs) == 1:  # no group is closed yet; one may be in this block
            kvs, indices = [*kvs, kvs[0]], [*indices, mx.full(indices[0].shape, -1, mx.int32)]
        places = [window, n_selected]
        indices = [_in_order(one, n) for one, n in zip(indices, places, strict=False)]
        return _sparse_attention(q, kvs, indices, **settings)

    Swaps().swap(attention, dict(rebind(type(attention), "_sparse_attention", attend)))


def _in_order(indices: mx.array, n_places: int) -> mx.array:
    """Ascending, with -1 for the empty places behind: (B, T, k) -> (B, T, n_places)."""
    ordered = mx.sort(mx.where(indices < 0, _EMPTY, indices), axis=-1)[..., :n_places]
    short = n_places - ordered.shape[-1]
    ordered = mx.pad(ordered, [(0, 0), (0, 0), (0, short)], constant_values=_EMPTY)
    return mx.where(ordered == _EMPTY, -1, ordered)
