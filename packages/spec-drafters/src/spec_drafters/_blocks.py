"""The body that all block heads share: projected taps as context, one forward over a block.

Taps of committed rows become keys and values of every layer once; a block `[anchor, mask, ...]`
attends to them and to itself and leaves nothing behind. Knows nothing about what is done with the
hidden rows.

References:
    DFlash: arXiv:2602.06036, section 3.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Self

import mlx.core as mx

from spec_core import LoadError, Target
from spec_drafters._context import ContextBody, ContextCache, Rows, take_in
from spec_drafters._fit import check_taps, rounded_to_bf16
from spec_drafters._head import HeadConfig, LayerView
from spec_drafters._layers import (
    Layer,
    Mask,
    attend,
    gated_mlp,
    layer_step,
    load_layers,
    rows_to_compute,
    split_kv,
    value_rows,
)
from spec_drafters._linear import Matrix
from spec_drafters._rope import Rotation
from spec_drafters._vocab import check_width
from spec_drafters._weights import Weights


class BlockBody(ContextBody):
    """A loaded body and the context of one sequence.

    Args:
        head: The head.
        weights: Its tensors; takes what belongs to the body.
        target: Lends its embedding table if the head has none.
        window: Context rows that a bidirectional full-attention layer sees; 0 for all.

    Raises:
        LoadError: a tensor is missing or does not fit.
    """

    def __init__(
        self, head: HeadConfig, weights: Weights, target: Target, *, window: int = 4096
    ) -> None:
        body = head.backbone
        self.head = head
        self._dtype = weights.dtype
        self._target = target
        self._embedding: Matrix | None = None
        if weights.has("embed_tokens.weight"):
            self._embedding = weights.matrix("embed_tokens", target.vocab_size, body.hidden_size)
        else:
            weights.leave("embed_tokens")
            check_width(head.family, "embed_tokens", body.hidden_size, target)
        n_in = len(head.taps) * head.target_hidden_size
        self._fc = weights.matrix("fc", body.hidden_size, n_in)
        self._hidden_norm = self._norm(weights, "hidden_norm.weight")
        self._layers, self._joint_kv = load_layers(weights, head)
        k_norms = mx.stack([layer.k_norm for layer in self._layers])
        self._k_norms = weights.keep(k_norms)  # (L, hd)
        self._final_norm = self._norm(weights, "norm.weight")
        self._rotation = Rotation(body.rope, body.head_dim)
        self._scale = _embedding_scale(head)
        self._log_snr = _log_snr_rows(weights, head)
        self._caches = [
            ContextCache(_rows_kept(view, window), head.block_size) for view in body.views
        ]

    def hidden(self, anchor: int, n_rows: int) -> mx.array:
        """Forward the block `[anchor, mask, ...]` and return its final normed rows, (n_rows, H)."""
        return self.hidden_together([self], [anchor], n_rows)

    def hidden_together(
        self, bodies: Sequence[Self], anchors: Sequence[int], n_rows: int
    ) -> mx.array:
        """Forward one block of `n_rows` rows for each of R bodies on the same weights.

        All rows share each matrix product; attention goes body by body, over its own context.

        Args:
            bodies: R of them, each with its own context.
            anchors: Their anchors.
            n_rows: Rows of each block.

        Returns:
            Final normed rows, block after block, shape (R * n_rows, H).
        """
        head, body, n_seq = self.head, self.head.backbone, len(bodies)
        ids: list[int] = []
        for one, anchor in zip(bodies, anchors, strict=True):
            one._unflushed = False
            ids += [anchor] + [head.mask_id] * (n_rows - 1)
        h = self._embed(mx.array(ids, mx.int32), n_rows)
        offsets = [one.n_rows for one in bodies]
        offset = offsets[0] if n_seq == 1 else mx.array(offsets, mx.int32)
        masks: dict[LayerView, list[Mask]] = {}
        for i, (layer, view) in enumerate(zip(self._layers, body.views, strict=True)):
            caches = [one._caches[i] for one in bodies]
            if view not in masks:
                masks[view] = [_mask(view, cache, n_rows) for cache in caches]
            h = self._layer(layer, h, offset, caches, masks[view])
        return mx.fast.rms_norm(h, self._final_norm, body.eps)

    def observe_together(self, bodies: Sequence[Self], taps: Sequence[Sequence[mx.array]]) -> None:
        """Append each body's committed rows: all rows share each matrix product.

        When it raises, no context has changed.

        Args:
            bodies: Bodies on the same weights.
            taps: For each the taps of its rows, as `observe` takes them.
        """
        sizes = [one[0].shape[0] for one in taps]
        n_rows = sum(sizes)
        rows = mx.concatenate([mx.concatenate(one, axis=-1) for one in taps])
        spare = rows_to_compute(n_rows) - n_rows
        if spare:
            rows = mx.pad(rows, [(0, spare), (0, 0)])
        keys, values = (x[:n_rows] for x in self._projected(rows))
        firsts = [one.n_rows for one in bodies]
        begun = zip(firsts, sizes, strict=True)
        positions = [first + i for first, size in begun for i in range(size)]
        shape = keys.shape  # (M, L, n_kv, hd)
        keys = self._rotation(keys.flatten(1, 2)[:, :, None], mx.array(positions, mx.int32))
        keys = keys.reshape(shape)
        ends = list(accumulate(sizes))[:-1]
        parts = [mx.split(x.transpose(1, 2, 0, 3), ends, axis=2) for x in (keys, values)]
        n_layers = len(self._layers)
        by_layer = [
            [mx.split(part, n_layers) for part in pair] for pair in zip(*parts, strict=True)
        ]
        take_in(bodies, [list(zip(*pair, strict=True)) for pair in by_layer])

    def _norm(self, weights: Weights, name: str) -> mx.array:
        body = self.head.backbone
        return weights.keep(weights.array(name, (body.hidden_size,)) + body.norm_offset)

    def _embed(self, ids: mx.array, n_rows: int) -> mx.array:
        """Rows of blocks of n_rows ids each, one after the other."""
        if self._embedding is not None:
            rows = self._embedding.lookup(ids)
        else:
            rows = self._target.embed(ids)
        rows = rows.astype(self._dtype)
        if self._scale != 1.0:
            rows = rows * self._scale
        if self._log_snr is None:
            return rows
        return (rows.reshape(-1, n_rows, rows.shape[-1]) + self._log_snr[:n_rows]).flatten(0, 1)

    def _context_rows(self, taps: Sequence[mx.array]) -> Rows:
        """Keys and values of M committed rows for every layer, (1, n_kv, M, hd) each."""
        keys, values = self._projected(mx.concatenate(list(taps), axis=-1))
        keys = self._rotation(keys.transpose(1, 2, 0, 3), self.n_rows)  # (L, n_kv, M, hd)
        values = values.transpose(1, 2, 0, 3)
        return [(keys[i : i + 1], values[i : i + 1]) for i in range(len(self._layers))]

    def _projected(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Unrotated keys, and values, of committed rows: (M, n H) -> 2 x (M, L, n_kv, hd)."""
        body = self.head.backbone
        rows = rows.astype(self._dtype)
        context = mx.fast.rms_norm(self._fc(rows), self._hidden_norm, body.eps)  # (M, H)
        n_rows, n_layers = context.shape[0], len(self._layers)
        if self._joint_kv is not None:
            y = self._joint_kv(context).reshape(n_rows, n_layers, -1)
        else:
            y = mx.stack([layer.kv(context) for layer in self._layers], axis=1)
        keys, values = split_kv(y, body.n_kv_heads, body.head_dim)  # (M, L, n_kv, hd)
        values = value_rows(keys, values, body.eps, body.kind == "gemma4")
        return mx.fast.rms_norm(keys, None, body.eps) * self._k_norms[:, None, :], values

    def _layer(
        self,
        layer: Layer,
        h: mx.array,
        offset: int | mx.array,
        caches: Sequence[ContextCache],
        masks: Sequence[Mask],
    ) -> mx.array:
        body = self.head.backbone
        contexts = [(c.with_block, mask) for c, mask in zip(caches, masks, strict=True)]

        def attention(x: mx.array) -> mx.array:
            return attend(layer, body, self._rotation, x, offset, contexts)

        def mlp(x: mx.array) -> mx.array:
            return gated_mlp(layer.gate_up, layer.down, x, gemma=body.kind == "gemma4")

        return layer_step(layer, body, h, attention, mlp)


def _rows_kept(view: LayerView, window: int) -> int | None:
    """Context rows of a layer: its own window; the draft window where it looks both ways."""
    if view.window is not None:
        return view.window
    return None if view.causal else window or None


def _mask(view: LayerView, cache: ContextCache, n_rows: int) -> Mask:
    """Which keys each block row sees: None for all, "causal", or (B, n_used + B) bool."""
    start = cache.n_rows
    if view.window is None or start + n_rows <= view.window:
        return "causal" if view.causal and n_rows > 1 else None
    block = start + mx.arange(n_rows)
    keys, queries = mx.concatenate([cache.positions(), block])[None, :], block[:, None]
    seen = keys > queries - view.window
    return seen & (keys <= queries) if view.causal else seen | (keys >= start)


def _embedding_scale(head: HeadConfig) -> float:
    """The factor of embedding rows; gemma rounds its square root of H to bf16."""
    if head.backbone.kind != "gemma4":
        return head.embed_scale
    return rounded_to_bf16(head.embed_scale)


def _log_snr_rows(weights: Weights, head: HeadConfig) -> mx.array | None:
    """What log-SNR conditioning adds to the rows of a block, (B, H): the same every round."""
    if head.log_snr is None:
        return None
    low, high = head.log_snr
    width = head.backbone.hidden_size
    first = weights.array("log_snr_embed.fc1.weight", (width, 128), dtype=mx.float32)
    first_bias = weights.array("log_snr_embed.fc1.bias", (width,), dtype=mx.float32)
    second = weights.array("log_snr_embed.fc2.weight", (width, width), dtype=mx.float32)
    second_bias = weights.array("log_snr_embed.fc2.bias", (width,), dtype=mx.float32)
    # The anchor is free of noise (log-SNR at its maximum), the masks are all noise.
    snr = [high] + [low] * (head.block_size - 1)
    times = [1000 * (x - low) / (high - low) for x in snr]
    angles = [[t * 10000 ** (-i / 64) for i in range(64)] for t in times]
    rows_of = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    features = mx.array(rows_of)  # (B, 128)
    inner = features @ first.T + first_bias
    rows = (inner * mx.sigmoid(inner)) @ second.T + second_bias
    return weights.keep(rows.astype(weights.dtype))


def check_fit(head: HeadConfig, target: Target) -> None:
    """Refuse a head that was made for another target.

    Raises:
        LoadError: depth or vocabulary differ, or the target cannot be tapped.
    """
    where = head.family
    check_taps(where, head.taps, head.n_target_layers, target)
    if head.vocab_size is not None and head.vocab_size != target.vocab_size:
        raise LoadError(
            f"[{where}] Drafter and target must share a vocabulary, got {head.vocab_size} and "
            f"{target.vocab_size} tokens. Use the drafter made for this target."
        )
    if not 0 <= head.mask_id < target.vocab_size:  # MLX does not check bounds
        raise LoadError(
            f'[{where}] "mask_token_id" must be one of the {target.vocab_size} tokens of the '
            f"target, got {head.mask_id}. Use the drafter made for this target."
        )
