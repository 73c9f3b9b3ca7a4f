"""A block head described once, whatever packaging it came in: data only."""

from dataclasses import dataclass
from typing import Literal

from spec_drafters._rope import Rope

Family = Literal["dspark", "dflash", "dflash2"]


@dataclass(frozen=True, slots=True)
class LayerView:
    """What a layer's block rows may see.

    Attributes:
        window: Key p is visible to query q iff p > q - window; None for no limit.
        causal: Block rows do not see later block rows.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Backbone:
    """The transformer of a head.

    Attributes:
        kind: "qwen3", or "gemma4" with its sandwich norms, unscaled attention and v norm.
        hidden_size: H.
        intermediate_size: I.
        n_heads: Query heads.
        n_kv_heads: Key and value heads.
        head_dim: Width of a head.
        eps: Of all norms.
        rope: Rotary positions.
        views: One per layer.
        norm_offset: Added to every norm weight at load (1 where they are stored minus one).
        gated_query: q_proj gives a query and a gate per head.
        sinks: A logit per head in the softmax denominator.
    """

    kind: Literal["qwen3", "gemma4"]
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    views: tuple[LayerView, ...]
    norm_offset: float = 0.0
    gated_query: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Lineage:
    """What another schema knows about a head beyond its native keys.

    Attributes:
        family: The algorithm it names, or None.
        packaging: Name of the schema.
        views: What each layer sees.
        scaled_rope: Rope scaling in the config is the head's own, not a copy of the target's.
    """

    family: str | None = None
    packaging: str = ""
    views: tuple[LayerView, ...] | None = None
    scaled_rope: bool = False


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A block head, whatever its packaging.

    Attributes:
        family: Which algorithm.
        packaging: Where it comes from, for reports.
        backbone: The transformer.
        taps: Target layers, 0-based, output of the layer.
        n_target_layers: Depth of the target it was made for, or None where it does not say.
        target_hidden_size: Width of a tap.
        block_size: B, rows of a block.
        logits_start: First row whose logits count: 0 when the anchor's row predicts.
        mask_id: Token of the rows behind the anchor.
        vocab_size: V, None where the config does not say.
        markov: Kind of Markov head, None without.
        temperatures: Divides the logit of a slot's confidence, one per slot; slots beyond keep 1.
        own_softcap: Softcap of the head's own lm_head, applied before the Markov bias.
        draft_softcap: Softcap of a reused head's logits (DFlash).
        draft_multiplier: Multiplies a reused head's logits before the softcap (DFlash).
        embed_scale: Multiplies embedding rows.
        log_snr: (min, max) of the log-SNR conditioning, or None.
        conv: (kernel size, group size) of the dynamic convolutions, or None.
        selector_top_k: Candidates per slot of the selector, or None.
    """

    family: Family
    packaging: str
    backbone: Backbone
    taps: tuple[int, ...]
    n_target_layers: int | None
    target_hidden_size: int
    block_size: int
    logits_start: int
    mask_id: int
    vocab_size: int | None
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    temperatures: tuple[float, ...] = ()
    own_softcap: float | None = None
    draft_softcap: float | None = None
    draft_multiplier: float = 1.0
    embed_scale: float = 1.0
    log_snr: tuple[float, float] | None = None
    conv: tuple[int, int] | None = None
    selector_top_k: int | None = None

    @property
    def n_drafts(self) -> int:
        """K, drafts a round."""
        return self.block_size - self.logits_start
