"""Which EAGLE-3 head a checkpoint holds: original and SpecForge, DeepSpec, or vLLM speculators."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_core import LoadError
from spec_drafters._rope import Rope, read_rope
from spec_drafters._speculators import is_speculators

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_N_DRAFTS = 5  # where a checkpoint does not say; the depth of the original's tree


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-3 head, whatever its packaging.

    Attributes:
        packaging: Where it comes from, for reports.
        prefix: Name of the layer, "midlayer" or "layers.0".
        gemma: Sandwich norms, unscaled attention, values normed without weight.
        hidden_size: H of the drafter.
        intermediate_size: I.
        n_heads: Query heads.
        n_kv_heads: Key and value heads.
        head_dim: Width of a head.
        eps: Of all norms.
        rope: Rotary positions.
        window: Keys a query sees, or None for all.
        taps: Target layers, output of the layer.
        n_target_layers: Depth of the target it was made for, or None where it does not say.
        n_drafts: Drafts a round.
        vocab_size: V, or None where the config is not to be trusted.
        norm_before_residual: The residual starts from the normed hidden state.
        norm_before_fc: One norm over the concatenated taps.
        fc_norm: One norm per tap.
        norm_output: The normed output is fed back.
        embed_scale: Multiplies embedding rows.
        softcap: Of the logits, or None.
    """

    packaging: str
    prefix: str
    gemma: bool
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    window: int | None
    taps: tuple[int, ...]
    n_target_layers: int | None
    n_drafts: int
    vocab_size: int | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None


def is_eagle3(config: Config, shapes: Shapes) -> bool:
    """True for a checkpoint of this family."""
    if is_speculators(config):
        named = config.get("speculators_model_type") or ""
        return (named or config["speculators_config"].get("algorithm")) == "eagle3"
    architecture = str((config.get("architectures") or [""])[0])
    return "Eagle3" in architecture or "midlayer.hidden_norm.weight" in shapes


def read_eagle(config: Config, shapes: Shapes, depth: int) -> EagleConfig:
    """The head of a checkpoint.

    Args:
        config: config.json.
        shapes: Shape of each tensor by name.
        depth: Layers of the target; the default taps are counted from it.

    Raises:
        LoadError: a setting is missing or the head has more than one layer.
    """
    wrapped = is_speculators(config)
    body: Config = (config.get("transformer_layer_config") or {}) if wrapped else config
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in shapes else "layers.0"
    _one_layer(shapes)
    gemma = f"{prefix}.pre_feedforward_layernorm.weight" in shapes
    width = _needed(body, "hidden_size")
    n_heads = _needed(body, "num_attention_heads")
    q_rows = shapes.get(f"{prefix}.self_attn.q_proj.weight", (width,))[0]
    head_dim = q_rows // n_heads
    k_rows = shapes.get(f"{prefix}.self_attn.k_proj.weight", (q_rows,))[0]
    rope = read_rope(body, head_dim, default_theta=1e4, where="eagle3")
    if gemma:
        rope = Rope(rope.theta, rope.dims, n_pairs=int(0.25 * head_dim / 2))
    taps, packaging = _taps(config, wrapped, depth)
    return EagleConfig(
        packaging=packaging,
        prefix=prefix,
        gemma=gemma,
        hidden_size=width,
        intermediate_size=_needed(body, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        eps=float(body.get("rms_norm_eps", 1e-6)),
        rope=rope,
        window=_window(body, wrapped),
        taps=taps,
        n_target_layers=config.get("num_target_layers"),
        n_drafts=_n_drafts(config),
        vocab_size=None if wrapped else config.get("vocab_size"),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        # SpecForge has a key of this name that means something else.
        norm_output=wrapped and bool(config.get("norm_output")),
        embed_scale=math.sqrt(width) if gemma else 1.0,
        softcap=float(config.get("final_logit_softcapping") or 30.0) if gemma else None,
    )


def _one_layer(shapes: Shapes) -> None:
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    n_layers = max(len(layers), 1)
    if n_layers > 1:
        raise LoadError(
            f"[eagle3] The head must have one layer, got {n_layers}. "
            "Heads of several layers are not supported; use lookup or another drafter."
        )


def _needed(body: Config, key: str) -> int:
    value = body.get(key)
    if value is None:
        raise LoadError(
            f'[eagle3] config.json must hold "{key}", got none. '
            "Use a complete export of the drafter."
        )
    return int(value)


def _taps(config: Config, wrapped: bool, depth: int) -> tuple[tuple[int, ...], str]:
    """Taps by output of the layer, and the packaging's name."""
    if not wrapped and config.get("target_layer_ids") is not None:
        return _ascending([int(layer) for layer in config["target_layer_ids"]]), "deepspec"
    place = config if wrapped else config.get("eagle_config") or {}
    entering = place.get("eagle_aux_hidden_state_layer_ids")
    # States entering a layer, counted from the TARGET's depth.
    entering = entering or [2, depth // 2, depth - 3]
    taps = _ascending([int(layer) - 1 for layer in entering])
    return taps, "speculators" if wrapped else "eagle"


def _ascending(taps: Sequence[int]) -> tuple[int, ...]:
    if list(taps) != sorted(set(taps)) or min(taps) < 0:
        raise LoadError(
            f"[eagle3] Taps must be ascending outputs of layers, got {list(taps)}. "
            "Use a complete export of the drafter."
        )
    return tuple(taps)


def _n_drafts(config: Config) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    promised = methods[0].get("speculative_tokens") or config.get("ttt_length")
    return int(promised or _N_DRAFTS)


def _window(body: Config, wrapped: bool) -> int | None:
    types = body.get("layer_types") or []
    sliding = wrapped and "sliding_attention" in types and body.get("use_sliding_window", True)
    window = body.get("sliding_window")
    return int(window) if sliding and window else None
