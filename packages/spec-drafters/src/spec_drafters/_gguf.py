"""Block heads in GGUF files: names, metadata and conventions turned into the native ones.

Two architectures: "dspark" as PrismML writes it, and "dflash" of llama.cpp, which also carries
DSpark and DFlash 2. Taps there count the state entering a layer, except in the older files.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import LoadError
from spec_core.weightfile import looks_like
from spec_drafters._head import LayerView, Lineage

_NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "hidden_norm": "hidden_norm",
    "markov_head_a": "markov_head.markov_w1",
    "markov_head_b": "markov_head.markov_w2",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence_head": "confidence_head.proj",
    "conf_proj": "confidence_head.proj",
    "log_snr_fc1": "log_snr_embed.fc1",
    "log_snr_fc2": "log_snr_embed.fc2",
    "selector_hidden": "candidate_selector.hidden_projection",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector.hidden_proj": "candidate_selector.hidden_projection",
    "selector.pred_codebook": "candidate_selector.predecessor_codebook",
    "selector.succ_codebook": "candidate_selector.successor_codebook",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv.base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv.base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
_PARTS = (".weight", ".bias", ".scales", ".biases")


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, mx.array], Lineage]:
    """Config in native keys, tensors under native names, and what the file says beyond them.

    Raises:
        LoadError: the file is not a block head, or holds a tensor of unknown name or type.
    """
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise LoadError(
            f'[gguf] "{path.name}" must be a whole GGUF file of tensor types that MLX reads, got '
            f"{_reason(path, error)}"
        ) from error
    raw, metadata = loaded
    settings = _Metadata(metadata)
    tensors = {_native(name): array for name, array in raw.items()}
    if "d2t" in tensors:  # absolute ids here, offsets in safetensors
        ids = tensors["d2t"].reshape(-1).astype(mx.int32)
        tensors["d2t"] = ids - mx.arange(ids.shape[0])
    tied = settings.architecture == "dspark" and "lm_head.weight" not in tensors
    if tied and "embed_tokens.weight" in tensors:
        for part in _PARTS:
            if f"embed_tokens{part}" in tensors:
                tensors[f"lm_head{part}"] = tensors[f"embed_tokens{part}"]
    return _config(settings, tensors), tensors, _lineage(settings, tensors)


def _reason(path: Path, error: Exception) -> str:
    """Why MLX does not read a file, and what to do."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start.startswith(b"GGUF"):
        return f"{looks_like(start)}. Download it again, or give the drafter's folder."
    return f"{error}. Use the file in bf16, Q8_0 or Q4_1."


class _Metadata:
    """Metadata by the last part of its key, under one or two prefixes of the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._all = metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in ("dspark", "dflash"):
            raise LoadError(
                f'[gguf] The file must hold a "dspark" or "dflash" head, got '
                f'"{self.architecture}". Convert a model with spec-convert; for other heads use '
                "their safetensors."
            )

    def get(self, key: str, default: Any = None) -> Any:
        name = self.architecture
        for candidate in (f"{name}.{name}.{key}", f"{name}.{key}"):
            if candidate in self._all:
                return _plain(self._all[candidate])
        return default

    def mask_id(self) -> int | None:
        """The mask token, among the head's own keys or the tokenizer's."""
        value = self.get("mask_token_id")
        if value is None:
            value = _plain(self._all.get("tokenizer.ggml.mask_token_id"))
        return None if value is None else int(value)

    @property
    def raw_taps(self) -> bool:
        """Taps are outputs of layers already: PrismML's doubled prefix, or an early dflash file."""
        name = self.architecture
        if f"{name}.{name}.target_layers" in self._all:
            return True
        return name == "dflash" and "dflash.mask_token_id" in self._all


def _plain(value: Any) -> Any:
    """A metadata value as Python has it."""
    return value.tolist() if isinstance(value, mx.array) else value  # sync: once, at load


def _native(name: str) -> str:
    """A tensor's native name.

    Raises:
        LoadError: an unknown one.
    """
    if name == "d2t":
        return name
    base, part = name, ""
    for suffix in _PARTS:
        if name.endswith(suffix):
            base, part = name.removesuffix(suffix), suffix
    base = base.removeprefix("dspark.")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", base)
    if layer is not None and layer[2] in _IN_LAYER:
        return f"layers.{layer[1]}.{_IN_LAYER[layer[2]]}{part}"
    if base in _NAMES:
        return _NAMES[base] + part
    raise LoadError(
        f'[gguf] Every tensor must have a known name, got "{name}". The file uses an algorithm '
        "that is not supported; use lookup, or another drafter."
    )


def _config(settings: _Metadata, tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """Native keys; the number of heads and their width follow from the tensors where they can."""
    heads = int(settings.get("attention.head_count", 1))
    width = int(settings.get("embedding_length", 0))
    embedding = tensors.get("embed_tokens.weight")
    taps = [int(layer) for layer in settings.get("target_layers") or []]
    config = {
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": settings.get("feed_forward_length"),
        "num_hidden_layers": settings.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv"),
        "head_dim": settings.get("attention.key_length", width // heads),
        "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": settings.get("rope.freq_base", 1e6),
        "vocab_size": None if embedding is None else embedding.shape[0],
        "block_size": settings.get("block_size"),
        "mask_token_id": settings.mask_id(),
        "target_layer_ids": taps if settings.raw_taps else [layer - 1 for layer in taps],
        "sample_from_anchor": _from_anchor(settings, tensors),
        "markov_rank": settings.get("markov_rank"),
        "log_snr_conditioning": settings.get("log_snr_conditioning"),
        "min_log_snr": settings.get("min_log_snr"),
        "max_log_snr": settings.get("max_log_snr"),
        "output_multiplier": settings.get("logit_scale"),
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "conv_group_size": settings.get("conv_group_size"),
        "selector_top_k": settings.get("selector_top_k"),
    }
    if not taps or min(config["target_layer_ids"]) < 0:
        raise LoadError(
            f"[gguf] The file must list target layers by their outputs, got {taps}. "
            "Use another export of the drafter."
        )
    return {key: value for key, value in config.items() if value is not None}


def _is_dspark(tensors: Mapping[str, mx.array]) -> bool:
    return "markov_head.markov_w1.weight" in tensors


def _from_anchor(settings: _Metadata, tensors: Mapping[str, mx.array]) -> bool:
    """Whether the anchor's row predicts: yes for DSpark unless it says no, never for DFlash."""
    return _is_dspark(tensors) and bool(settings.get("sample_from_anchor", True))


def _lineage(settings: _Metadata, tensors: Mapping[str, mx.array]) -> Lineage:
    n_layers = int(settings.get("block_count", 0))
    window = settings.get("attention.sliding_window")
    pattern = settings.get("attention.sliding_window_pattern") or [bool(window)] * n_layers
    causal = bool(settings.get("attention.causal", False))
    views = tuple(
        LayerView(int(window) if window and slides else None, causal)
        for slides in pattern[:n_layers]
    )
    return Lineage("dspark" if _is_dspark(tensors) else "dflash", "gguf", views)
