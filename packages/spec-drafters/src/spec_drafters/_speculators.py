"""The vLLM "speculators" schema, translated into the native keys of block heads.

Only config.json differs from the native layout; tensors carry the native names. Knows nothing about
weights' values.
"""

from collections.abc import Mapping
from typing import Any

from spec_core import LoadError
from spec_drafters._head import LayerView, Lineage

_BACKBONE = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)
_COPIED = ("block_size", "mask_token_id", "markov_rank", "markov_head_type")
_OPTIONAL = (
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "conv_group_size",
    "selector_top_k",
)
SUPPORTED = ("dspark", "dflash", "dflash2", "eagle3")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """True for a config in this schema."""
    return "speculators_config" in config or "speculators_model_type" in config


def algorithm(config: Mapping[str, Any]) -> str:
    """The algorithm by its own name.

    Raises:
        LoadError: it is not supported.
    """
    settings = config.get("speculators_config") or {}
    name = config.get("speculators_model_type") or settings.get("algorithm")
    if name not in SUPPORTED:
        listed = ", ".join(f'"{n}"' for n in SUPPORTED)
        raise LoadError(
            f'[speculators] The algorithm must be one of {listed}, got "{name}". '
            "Use lookup, or another drafter for this target."
        )
    return str(name)


def translate(config: Mapping[str, Any]) -> tuple[dict[str, Any], Lineage]:
    """Native keys of a block head, and what the schema says beyond them.

    Raises:
        LoadError: a needed key is missing.
    """
    name = algorithm(config)
    backbone = dict(config.get("transformer_layer_config") or {})
    missing = [key for key in _BACKBONE if backbone.get(key) is None]
    if missing:
        raise LoadError(
            f'[{name}] "transformer_layer_config" must hold {", ".join(_BACKBONE)}, got none for '
            f"{', '.join(missing)}. Use a complete export of the drafter."
        )
    # A config is written as its difference from the class, so absent keys are the class's.
    heads = 32 if backbone.get("model_type", "qwen3") == "qwen3" else None
    backbone.setdefault("num_key_value_heads", heads or backbone["num_attention_heads"])
    native = {**backbone, **{k: config[k] for k in _COPIED if config.get(k) is not None}}
    native.setdefault("block_size", 8)
    native.update({k: config[k] for k in _OPTIONAL if config.get(k) is not None})
    native["target_layer_ids"] = native_taps(config.get("aux_hidden_state_layer_ids"), name)
    native["logits_start"] = logits_start(config, int(native["block_size"]))
    return native, Lineage(name, "speculators", _views(config, backbone, name), scaled_rope=True)


def native_taps(aux: list[int] | None, where: str) -> list[int]:
    """Layers by their output: this schema counts the state ENTERING layer k, the output of k - 1.

    Raises:
        LoadError: no list, or a layer before the first.
    """
    if not aux:
        raise LoadError(
            f'[{where}] config.json must hold "aux_hidden_state_layer_ids", got none. '
            "Use a complete export of the drafter."
        )
    if min(aux) < 1:
        raise LoadError(
            f"[{where}] Taps must be outputs of layers (auxiliary ids from 1), got {list(aux)}. "
            "The embedding output cannot be tapped; use another drafter."
        )
    return [int(layer) - 1 for layer in aux]


def logits_start(config: Mapping[str, Any], block_size: int) -> int:
    """First row that predicts, from the drafts the export promises."""
    settings = config.get("speculators_config") or {}
    methods = settings.get("proposal_methods") or [{}]
    promised = methods[0].get("speculative_tokens")
    if promised is not None and 0 <= block_size - int(promised) < block_size:
        return block_size - int(promised)
    return 0 if config.get("sample_from_anchor") is True else 1


def _views(
    config: Mapping[str, Any], backbone: Mapping[str, Any], name: str
) -> tuple[LayerView, ...]:
    """Sliding layers are causal unless the export says otherwise; full layers look both ways."""
    n_layers = int(backbone["num_hidden_layers"])
    types = backbone.get("layer_types") or []
    window = backbone.get("sliding_window")
    if not (window and backbone.get("use_sliding_window")):
        return (LayerView(),) * n_layers
    both_ways = config.get("sliding_window_non_causal")
    causal = not (name == "dflash2" if both_ways is None else both_ways)
    return tuple(
        LayerView(int(window), causal) if kind == "sliding_attention" else LayerView()
        for kind in (list(types) + ["full_attention"] * n_layers)[:n_layers]
    )
