"""Which block head a checkpoint holds, read from what its files contain.

The layouts of DeepSpec, z-lab, SpecForge, LiquidAI, Nemotron, the Qwen3.5 fork and Bonsai become
one dataclass. Knows nothing about weights' values.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_core import LoadError
from spec_drafters._head import Backbone, Family, HeadConfig, LayerView, Lineage
from spec_drafters._rope import Rope, read_rope, read_theta, rope_settings
from spec_drafters._speculators import is_speculators, translate

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def read_block_head(
    config: Config, shapes: Shapes, target_hidden_size: int, lineage: Lineage | None = None
) -> HeadConfig:
    """The head of a checkpoint.

    Args:
        config: config.json, native or in the speculators schema.
        shapes: Shape of each tensor by canonical name.
        target_hidden_size: H of the target.
        lineage: What another container says beyond the keys.

    Raises:
        LoadError: the algorithm is not supported, or a needed setting is missing.
    """
    settings = _settings(config, lineage)
    family = _family(settings, shapes)
    backbone = _backbone(settings, shapes, family)
    head = HeadConfig(
        family=family,
        packaging=settings.lineage.packaging or _packaging(settings, family),
        backbone=backbone,
        taps=_taps(settings, family),
        n_target_layers=settings.integer("num_target_layers", None),
        target_hidden_size=target_hidden_size,
        block_size=settings.integer("block_size", 16 if family != "dspark" else None) or 0,
        logits_start=_logits_start(settings, family),
        mask_id=settings.needed("mask_token_id", family),
        vocab_size=settings.integer("vocab_size", None),
        log_snr=_log_snr(settings, family),
    )
    _check_block(head)
    if family == "dspark":
        return replace(head, **_dspark_extras(settings, shapes, backbone))
    return replace(head, **_dflash_extras(settings, shapes, family))


def block_family(config: Config, shapes: Shapes, lineage: Lineage | None = None) -> Family:
    """Which of the block families a checkpoint holds.

    Raises:
        LoadError: none that is supported.
    """
    return _family(_settings(config, lineage), shapes)


def _settings(config: Config, lineage: Lineage | None) -> "_Settings":
    if is_speculators(config):
        return _Settings(*translate(config))
    return _Settings(config, lineage or Lineage())


class _Settings:
    """A config whose keys may sit in `dflash_config` or at the top."""

    def __init__(self, config: Config, lineage: Lineage) -> None:
        self.top = config
        self.lineage = lineage
        self.nested: Config = config.get("dflash_config") or {}

    def get(self, key: str, default: Any = None) -> Any:
        """The nested value, else the top one, else the default; null counts as absent."""
        for place in (self.nested, self.top):
            if place.get(key) is not None:
                return place[key]
        return default

    def integer(self, key: str, default: int | None) -> int | None:
        value = self.get(key, default)
        return None if value is None else int(value)

    def needed(self, key: str, where: str) -> int:
        value = self.integer(key, None)
        if value is None:
            raise LoadError(
                f'[{where}] config.json must hold "{key}", got none. '
                "Use a complete export of the drafter."
            )
        return value

    @property
    def architecture(self) -> str:
        return str((self.top.get("architectures") or [""])[0])


def _family(settings: _Settings, shapes: Shapes) -> Family:
    projector = settings.get("projector_type")
    if projector not in (None, "dflash", "dspark", "dflash2"):
        raise LoadError(
            f'[load] The head type must be "dflash" or "dspark", got "{projector}". '
            "Use lookup, or another drafter for this target."
        )
    if any(name.startswith(("candidate_selector.", "layers.0.attention_conv.")) for name in shapes):
        return "dflash2"
    markov = any(name.startswith(("markov_head.", "confidence_head.")) for name in shapes)
    named = "DSpark" in settings.architecture or projector == "dspark"
    if settings.lineage.family is not None and not markov:
        return "dspark" if settings.lineage.family == "dspark" else "dflash"
    named = named or settings.get("markov_rank") is not None
    # DeepSpec's heads without a Markov part are known by their own table and head; DFlash has none.
    own = {"embed_tokens.weight", "lm_head.weight"} <= shapes.keys() and not settings.nested
    return "dspark" if markov or named or own else "dflash"


def _packaging(settings: _Settings, family: Family) -> str:
    if settings.top.get("model_type") == "qwen3_5":
        return "qwen3.5 fork"
    if settings.get("log_snr_conditioning"):
        return "bonsai"
    if family != "dspark":
        return "z-lab"
    if settings.architecture.startswith("Lfm2"):
        return "lfm2"
    return "specforge" if settings.nested.get("projector_type") == "dspark" else "deepspec"


def _taps(settings: _Settings, family: Family) -> tuple[int, ...]:
    listed = settings.get("target_layer_ids")
    if listed is not None:
        taps = tuple(int(layer) for layer in listed)
    elif family == "dspark":
        raise LoadError(
            '[dspark] config.json must hold "target_layer_ids", got none. '
            "Use a complete export of the drafter."
        )
    else:
        taps = _default_taps(settings, family)
    if list(taps) != sorted(set(taps)) or not taps:
        raise LoadError(f'[{family}] "target_layer_ids" must ascend, got {list(taps)}.')
    return taps


def _default_taps(settings: _Settings, family: Family) -> tuple[int, ...]:
    """What the training helper picks: evenly spread, first 1, last n - 3."""
    depth = settings.needed("num_target_layers", family)
    n = settings.needed("num_hidden_layers", family)
    if n == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (n - 1)) for i in range(n))


def _logits_start(settings: _Settings, family: Family) -> int:
    explicit = settings.integer("logits_start", None)
    if explicit is not None:
        return explicit
    from_anchor = settings.get("sample_from_anchor")
    if from_anchor is not None:
        return 0 if from_anchor else 1
    return 0 if family == "dspark" else 1


def _backbone(settings: _Settings, shapes: Shapes, family: Family) -> Backbone:
    top = settings.top
    kind = "gemma4" if "layers.0.pre_feedforward_layernorm.weight" in shapes else "qwen3"
    fork = top.get("model_type") == "qwen3_5"
    hidden_size = settings.needed("hidden_size", family)
    n_heads = settings.needed("num_attention_heads", family)
    head_dim = shapes.get("layers.0.self_attn.q_norm.weight", (0,))[0]
    head_dim = head_dim or settings.integer("head_dim", hidden_size // n_heads) or 0
    k_rows = shapes.get("layers.0.self_attn.k_proj.weight", (0,))[0]
    n_kv = k_rows // head_dim or settings.integer("num_key_value_heads", 8) or 8
    q_rows = shapes.get("layers.0.self_attn.q_proj.weight", (n_heads * head_dim,))[0]
    return Backbone(
        kind=kind,
        hidden_size=hidden_size,
        intermediate_size=settings.needed("intermediate_size", family),
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        eps=float(top.get("rms_norm_eps", 1e-6)),
        rope=_block_rope(settings, kind, head_dim, fork, family),
        views=settings.lineage.views or _views(settings, family),
        norm_offset=1.0 if fork else 0.0,
        gated_query=fork and q_rows == 2 * n_heads * head_dim,
        sinks="layers.0.self_attn.attention_sink_bias" in shapes,
    )


def _block_rope(settings: _Settings, kind: str, head_dim: int, fork: bool, family: Family) -> Rope:
    """Rope by lineage: partial factors are real in the fork and gemma4, inherited noise elsewhere.

    The native config is a copy of the target's; only SpecForge heads were trained with the rope
    scaling that it shows.
    """
    top = settings.top
    parameters = top.get("rope_parameters") or {}
    factor = parameters.get("partial_rotary_factor", top.get("partial_rotary_factor"))
    partial = float(factor or 0.25) if fork else 1.0
    interleaved = settings.get("rope_is_neox_style") is False
    source = dict(top)
    own = settings.nested.get("projector_type") == "dspark" or family != "dspark"
    if not (own or settings.lineage.scaled_rope):
        source = _without_scaling(source)
    rope = read_rope(
        source, head_dim, default_theta=1e6, partial=partial, interleaved=interleaved, where=family
    )
    if kind == "gemma4":
        return replace(rope, n_pairs=int(float(factor or 0.25) * head_dim / 2))
    return rope


def _without_scaling(config: dict[str, Any]) -> dict[str, Any]:
    theta = read_theta(config, rope_settings(config, "full_attention"))
    return {} if theta is None else {"rope_theta": theta}


def _views(settings: _Settings, family: Family) -> tuple[LayerView, ...]:
    n_layers = settings.needed("num_hidden_layers", family)
    if family == "dspark":
        return (_dspark_view(settings),) * n_layers
    types = settings.get("layer_types") or ["full_attention"] * n_layers
    if len(types) < n_layers:
        raise LoadError(
            f'[{family}] "layer_types" must name {n_layers} layers, got {len(types)}. '
            "Use a complete export of the drafter."
        )
    explicit = next(
        (
            value
            for value in (
                settings.top.get("is_causal"),
                settings.nested.get("is_causal"),
                settings.nested.get("causal"),
                settings.get("dflash_query_causal"),
            )
            if value is not None
        ),
        None,
    )
    views: list[LayerView] = []
    for kind in types[:n_layers]:
        sliding = kind == "sliding_attention"
        window = settings.needed("sliding_window", family) if sliding else None
        views.append(LayerView(window, sliding if explicit is None else bool(explicit)))
    return tuple(views)


def _dspark_view(settings: _Settings) -> LayerView:
    """All layers alike: bidirectional and full unless the head says it is causal.

    `sliding_window` and `layer_types` alone are copies of the target's and mean nothing.
    """
    causal = settings.get("dflash_query_causal")
    if causal is None:
        causal = settings.nested.get("causal")
    if settings.get("use_swa"):
        return LayerView(settings.integer("swa_window_size", None), bool(causal))
    if not causal:
        return LayerView()
    return LayerView(settings.integer("sliding_window", None), True)


def _log_snr(settings: _Settings, family: Family) -> tuple[float, float] | None:
    if not settings.get("log_snr_conditioning"):
        return None
    low, high = float(settings.get("min_log_snr", -9)), float(settings.get("max_log_snr", 9))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise LoadError(
            f'[{family}] "min_log_snr" must be below "max_log_snr", got {low} and {high}. '
            "Use a complete export of the drafter."
        )
    return low, high


def _dspark_extras(settings: _Settings, shapes: Shapes, backbone: Backbone) -> dict[str, Any]:
    gemma = backbone.kind == "gemma4"
    markov = None
    if shapes.get("markov_head.markov_w1.weight", (0, 0))[1]:  # rank 0 is none
        markov = settings.get("markov_head_type", "vanilla")
        if markov not in ("vanilla", "gated", "rnn"):
            raise LoadError(
                f'[dspark] "markov_head_type" must be vanilla, gated or rnn, got "{markov}". '
                "Use another drafter for this target."
            )
    softcap = settings.get("final_logit_softcapping", 30.0) if gemma else None
    return {
        "markov": markov,
        "temperatures": _temperatures(settings),
        "own_softcap": None if softcap is None else float(softcap),
        "embed_scale": math.sqrt(backbone.hidden_size) if gemma else 1.0,
    }


def _temperatures(settings: _Settings) -> tuple[float, ...]:
    """What the head's confidences were calibrated with, slot by slot; nothing for most heads."""
    found = settings.get("confidence_temperatures", [])
    usable = isinstance(found, list) and all(
        type(t) in (int, float) and 0 < t < math.inf for t in found
    )
    if not usable:
        raise LoadError(
            f'[dspark] "confidence_temperatures" must be a list of numbers > 0, got {found!r:.80}. '
            "Take the key out of config.json, or use a complete export of the drafter."
        )
    return tuple(map(float, found))


def _dflash_extras(settings: _Settings, shapes: Shapes, family: Family) -> dict[str, Any]:
    softcap = settings.get("final_logit_softcapping")
    extras: dict[str, Any] = {
        "draft_softcap": None if softcap is None else float(softcap),
        "draft_multiplier": float(settings.get("output_multiplier", 1.0)),
        "embed_scale": float(settings.get("input_embedding_scale", 1.0)),
    }
    if family == "dflash2":
        kernel = shapes.get("layers.0.attention_conv.base_kernel", (2, 2, 0))[1]
        extras["conv"] = (kernel, settings.integer("conv_group_size", 16))
        extras["selector_top_k"] = settings.integer("selector_top_k", 16)
    return extras


def _check_block(head: HeadConfig) -> None:
    if not 0 <= head.logits_start < head.block_size:
        raise LoadError(
            f"[{head.family}] The block must hold more rows than logits_start, got block_size "
            f"{head.block_size} and logits_start {head.logits_start}. "
            'Set "block_size" in config.json.'
        )
