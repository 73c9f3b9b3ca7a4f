"""GGUF metadata to `config.json` and `generation_config.json`.

Values that the file does not state are taken from the tensor table, and otherwise refused by
key: nothing is guessed from a model's name. Knows nothing about weights or tokenisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spec_convert.container import Container
from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata
from spec_convert.names import Architecture

Config = dict[str, Any]

# Not stored in the file: every Gemma 3 text model shares these.
_GEMMA3_SLIDING_PATTERN = 6
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62


def model_config(architecture: Architecture, container: Container) -> Config:
    """`config.json` of the output, without its quantisation section.

    Args:
        architecture: rules of the file's architecture.
        container: header of the file.

    Returns:
        A dictionary ready for JSON.

    Raises:
        ConvertError: a required key is missing or has the wrong type.
    """
    config = _common(architecture.name, container)
    config.update(_SPECIFIC[architecture.name](container, config))
    config.update(_token_ids(container.metadata))
    return config


def generation_config(metadata: Metadata) -> Config:
    """`generation_config.json`: the tokens that start, end and pad a text."""
    return {"_from_model_config": True, **_token_ids(metadata)}


def end_token_ids(metadata: Metadata) -> list[int]:
    """Ids that end an answer: end of text, of turn and of message, without repeats."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.integer(f"tokenizer.ggml.{key}", None) for key in keys]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _token_ids(metadata: Metadata) -> Config:
    ends = end_token_ids(metadata)
    ids: Config = {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id", None),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _common(arch: str, container: Container) -> Config:
    metadata = container.metadata
    shapes = {tensor.name: tensor.shape for tensor in container.tensors}
    if "token_embd.weight" not in shapes:
        raise ConvertError(
            '[config] The file must hold the tensor "token_embd.weight", which is missing. '
            "Use a file of a whole language model."
        )
    hidden = metadata.integer(f"{arch}.embedding_length")
    heads = metadata.integer(f"{arch}.attention.head_count")
    if heads < 1 or hidden < 1:
        raise ConvertError(
            f'[config] "{arch}.attention.head_count" and "{arch}.embedding_length" must be '
            f"positive, got {heads} and {hidden}."
        )
    vocab, width = shapes["token_embd.weight"][-2:]
    if width != hidden:
        raise ConvertError(
            f'[config] Rows of "token_embd.weight" must hold {hidden} values, got {width}.'
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "intermediate_size": metadata.integer(f"{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": metadata.integer(f"{arch}.attention.key_length", hidden // heads),
        "rms_norm_eps": _short(metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "vocab_size": vocab,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _short(value: float) -> float:
    """The decimal that a float32 was written from: 9.999999747e-06 was 1e-05."""
    return float(f"{value:.7g}")


def _llama(container: Container, config: Config) -> Config:
    names = {tensor.name for tensor in container.tensors}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        **_rope_scaling("llama", container.metadata),
    }


def _gemma3(container: Container, config: Config) -> Config:
    metadata = container.metadata
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": _GEMMA3_SLIDING_PATTERN,
        "rope_local_base_freq": _GEMMA3_LOCAL_ROPE_THETA,
        "query_pre_attn_scalar": scalar,
        **_rope_scaling("gemma3", metadata),
    }


def _rope_scaling(arch: str, metadata: Metadata) -> Config:
    kind = metadata.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    factor = metadata.number(f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = metadata.integer(f"{arch}.rope.scaling.original_context_length")
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        return {"rope_scaling": scaling}
    raise ConvertError(
        f'[config] "{arch}.rope.scaling.type" must be "none", "linear" or "yarn", got "{kind}".'
    )


_SPECIFIC: Mapping[str, Callable[[Container, Config], Config]] = {
    "llama": _llama,
    "gemma3": _gemma3,
}
