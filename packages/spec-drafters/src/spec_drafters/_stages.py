"""The draft stages of a DeepSeek-V4 checkpoint as a body: decoder blocks over projected taps.

Each stage is a V4 decoder block: latent attention and a mixture of experts, each between its own
hyper-connections. In V4.1 a sublayer reads the copies with the coefficients of the one before.

References:
    DeepSeek-V4 and V4.1 inference code, the `mtp` blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_core import Target
from spec_drafters._context import ContextBody, ContextCache
from spec_drafters._deepseek_config import DraftStages
from spec_drafters._experts import Mixture, load_mixture
from spec_drafters._hyper import (
    HyperConnection,
    HyperHead,
    collapse,
    expand,
    load_hyper,
    load_hyper_head,
)
from spec_drafters._latent import LatentAttention, load_attention
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class Stage:
    """One decoder block.

    Attributes:
        attention: Over the context and the block.
        attention_norm: Shape (D,).
        attention_mixes: Around it.
        mixture: Of experts.
        mixture_norm: Shape (D,).
        mixture_mixes: Around it.
    """

    attention: LatentAttention
    attention_norm: mx.array
    attention_mixes: HyperConnection
    mixture: Mixture
    mixture_norm: mx.array
    mixture_mixes: HyperConnection


class StageBody(ContextBody):
    """All stages and the context of one sequence.

    Args:
        stages: Their description.
        weights: Their tensors; takes what belongs to the body.
        target: Lends its embedding table.

    Raises:
        LoadError: a tensor is missing or does not fit.
    """

    def __init__(self, stages: DraftStages, weights: Weights, target: Target) -> None:
        width = stages.hidden_size
        self.stages = stages
        self._dtype = weights.dtype
        self._target = target
        weights.leave("embed")
        self._projection = weights.matrix("mtp.0.main_proj", width, len(stages.taps) * width)
        self._context_norm = weights.array("mtp.0.main_norm.weight", (width,))
        self._stages = [_load_stage(weights, i, stages, target) for i in range(stages.n_stages)]
        self._head: HyperHead | None = None
        if stages.generation == "v4":
            name = f"{stages.last}.hc_head"
            self._head = load_hyper_head(weights, name, width, stages.eps, stages.hyper)
        window = stages.attention.window
        self._caches = [ContextCache(window, stages.block_size) for _ in self._stages]

    def hidden(self, anchor: int, n_rows: int) -> mx.array:
        """Forward the block `[anchor, mask, ...]`; its rows before the final norm, (n_rows, D)."""
        self._unflushed = False
        stages = self.stages
        ids = mx.array([anchor] + [stages.mask_id] * (n_rows - 1), mx.int32)
        rows = self._target.embed(ids).astype(self._dtype)
        copies = (n_rows, stages.hyper.n_copies, stages.hidden_size)
        stream = mx.broadcast_to(rows[:, None], copies)
        if self._head is not None:
            for stage, cache in zip(self._stages, self._caches, strict=True):
                stream = self._forward(stage, stream, cache, ids)
            return collapse(stream, self._head(stream))
        pre = mx.broadcast_to((mx.arange(copies[1]) == 0).astype(mx.float32), copies[:2])
        for stage, cache in zip(self._stages, self._caches, strict=True):
            stream, pre = self._forward_lagging(stage, stream, pre, cache, ids)
        return collapse(stream, pre)

    def _forward(
        self, stage: Stage, stream: mx.array, cache: ContextCache, ids: mx.array
    ) -> mx.array:
        """One V4 stage: (B, hc, D) -> (B, hc, D)."""
        eps = self.stages.eps
        mixes = stage.attention_mixes(stream)
        x = mx.fast.rms_norm(collapse(stream, mixes.pre), stage.attention_norm, eps)
        stream = expand(stage.attention(x, cache), stream, mixes)
        mixes = stage.mixture_mixes(stream)
        x = mx.fast.rms_norm(collapse(stream, mixes.pre), stage.mixture_norm, eps)
        return expand(stage.mixture(x, ids), stream, mixes)

    def _forward_lagging(
        self, stage: Stage, stream: mx.array, pre: mx.array, cache: ContextCache, ids: mx.array
    ) -> tuple[mx.array, mx.array]:
        """One V4.1 stage, and the coefficients (B, hc) that the next one collapses with."""
        eps = self.stages.eps
        mixes = stage.attention_mixes(stream)
        x = mx.fast.rms_norm(collapse(stream, pre), stage.attention_norm, eps)
        stream = expand(stage.attention(x, cache), stream, mixes)
        after = stage.mixture_mixes(stream)
        x = mx.fast.rms_norm(collapse(stream, mixes.pre), stage.mixture_norm, eps)
        return expand(stage.mixture(x, ids), stream, after), after.pre

    def _context_rows(self, taps: Sequence[mx.array]) -> list[tuple[mx.array, mx.array]]:
        """Keys of M committed rows for every stage, (1, 1, M, hd); values are the keys."""
        n_skipped = max(0, taps[0].shape[0] - self.stages.attention.window)
        for cache in self._caches:
            cache.skip(n_skipped)
        joined = mx.concatenate([tap[n_skipped:] for tap in taps], axis=-1).astype(self._dtype)
        rows = mx.fast.rms_norm(self._projection(joined), self._context_norm, self.stages.eps)
        keys = [stage.attention.rows(rows, self.n_rows) for stage in self._stages]
        return [(one, one) for one in keys]


def _load_stage(weights: Weights, i: int, stages: DraftStages, target: Target) -> Stage:
    width, eps, prefix = stages.hidden_size, stages.eps, f"mtp.{i}"
    return Stage(
        attention=load_attention(weights, f"{prefix}.attn", width, eps, stages.attention),
        attention_norm=weights.array(f"{prefix}.attn_norm.weight", (width,)),
        attention_mixes=load_hyper(weights, f"{prefix}.hc_attn", width, eps, stages.hyper),
        mixture=load_mixture(weights, f"{prefix}.ffn", width, target.vocab_size, stages.experts),
        mixture_norm=weights.array(f"{prefix}.ffn_norm.weight", (width,)),
        mixture_mixes=load_hyper(weights, f"{prefix}.hc_ffn", width, eps, stages.hyper),
    )
