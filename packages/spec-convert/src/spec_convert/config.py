"""Parts of `config.json` that model families share, and `generation_config.json`.

Values that the file does not state are taken from the tensor table, and otherwise refused by
key: nothing is guessed from a model's name. Knows nothing about weights or tokenisers.
"""

from __future__ import annotations

from typing import Any

from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.metadata import Metadata

Config = dict[str, Any]


def generation_config(metadata: Metadata) -> Config:
    """`generation_config.json`: the tokens that start, end and pad a text."""
    return {"_from_model_config": True, **token_ids(metadata)}


def end_token_ids(metadata: Metadata) -> list[int]:
    """Ids that end an answer: end of text, of turn and of message, without repeats."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.integer(f"tokenizer.ggml.{key}", None) for key in keys]
    return list(dict.fromkeys(token for token in ids if token is not None))


def token_ids(metadata: Metadata) -> Config:
    """Special token ids as `config.json` states them."""
    ends = end_token_ids(metadata)
    ids: Config = {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id", None),
    }
    return {key: value for key, value in ids.items() if value is not None}


def base_config(
    facts: Facts, model_type: str, architecture: str, *, vocab: Config | None = None
) -> Config:
    """Keys that every decoder needs.

    Args:
        facts: the model's header.
        model_type: `model_type` of the output.
        architecture: class name for `architectures`.
        vocab: vocabulary keys; None reads them from the embedding, which drafters may lack.

    Returns:
        A dictionary ready for JSON.

    Raises:
        ConvertError: a required key is missing or contradicts the tensors.
    """
    hidden = positive(facts, "embedding_length", facts.integer("embedding_length"))
    name = "attention.head_count"
    heads = positive(facts, name, facts.any_layer(name))
    name = "attention.key_length"
    head_dim = positive(facts, name, facts.integer(name, hidden // heads))
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": facts.n_layers,
        "intermediate_size": facts.any_layer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.any_layer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(facts),
        "max_position_embeddings": facts.integer("context_length"),
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        **(vocabulary(facts, hidden) if vocab is None else vocab),
        **rope_scaling(facts),
        **token_ids(facts.metadata),
    }


def _epsilon(facts: Facts) -> float:
    """Nemotron-H files may state it under the name of plain layer norms."""
    if facts.key("attention.layer_norm_rms_epsilon") in facts.metadata:
        return facts.number("attention.layer_norm_rms_epsilon")
    if facts.key("attention.layer_norm_epsilon") in facts.metadata:
        return facts.number("attention.layer_norm_epsilon")
    return facts.number("attention.layer_norm_rms_epsilon")


def positive(facts: Facts, name: str, value: int) -> int:
    """`value`, which must be at least 1; the refusal names the architecture's setting `name`."""
    if value < 1:
        raise ConvertError(
            f'[config] "{facts.key(name)}" must be positive, got {value}. The file is damaged.'
        )
    return value


def vocabulary(facts: Facts, hidden: int) -> Config:
    """Vocabulary size and whether input and output share one table.

    Raises:
        ConvertError: the embedding is missing or has another width.
    """
    shape = facts.shapes.get("token_embd.weight")
    if shape is None:
        raise ConvertError(
            '[config] The file must hold the tensor "token_embd.weight", which is missing. '
            "Use a file of a whole language model."
        )
    if shape[-1] != hidden or len(shape) != 2:
        raise ConvertError(
            f'[config] Rows of "token_embd.weight" must hold {hidden} values, got {shape[-1]}.'
        )
    return {
        "vocab_size": shape[0],
        "tie_word_embeddings": facts.said_tied or "output.weight" not in facts.shapes,
    }


def rope_scaling(facts: Facts) -> Config:
    """The `rope_scaling` entry for linear and yarn scaling; empty without.

    Raises:
        ConvertError: the file asks for another kind.
    """
    kind = facts.metadata.text(facts.key("rope.scaling.type"), "none")
    if kind == "none":
        return {}
    factor = facts.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": factor}}
    if kind == "yarn":
        return {"rope_scaling": _yarn(facts, factor)}
    raise ConvertError(
        f'[config] "{facts.key("rope.scaling.type")}" must be "none", "linear" or "yarn", '
        f'got "{kind}". Use a file with one of these.'
    )


def _yarn(facts: Facts, factor: float) -> Config:
    scaling: Config = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.integer("rope.scaling.original_context_length"),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if facts.key(f"rope.scaling.{key}") in facts.metadata:
            scaling[name] = facts.number(f"rope.scaling.{key}")
    if facts.key("rope.scaling.yarn_log_multiplier") in facts.metadata:
        multiplier = facts.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return scaling
