"""Parts and writers of tiny random checkpoints, named as the published ones name them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from spec_core.testing import ToyTarget

Tensors = dict[str, np.ndarray]

HIDDEN, INNER, VOCAB = 32, 48, 40
HEADS, KV, HEAD_DIM = 4, 2, 16
TAPS = (1, 3)
DEPTH = 6
RANK = 8


class TinyTarget(ToyTarget):
    """A toy target as wide as the tiny heads."""

    hidden_size = HIDDEN
    n_layers = DEPTH

    def __init__(self, vocab_size: int = VOCAB, seed: int = 0) -> None:
        super().__init__(vocab_size=vocab_size, seed=seed)


def backbone_tensors(
    rng: np.random.Generator,
    *,
    n_layers: int = 2,
    n_taps: int = len(TAPS),
    gemma: bool = False,
    k_eq_v: bool = False,
    gated: bool = False,
    sinks: bool = False,
    bias: bool = False,
    norm_shift: float = 0.0,
) -> Tensors:
    """fc, norms and layers; names as DeepSpec and z-lab write them."""

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return rng.normal(0, 1.5 / np.sqrt(n_in), (n_out, n_in))

    def norm(size: int) -> np.ndarray:
        return 1 + 0.3 * rng.normal(size=size) - norm_shift

    w: Tensors = {
        "fc.weight": matrix(HIDDEN, n_taps * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for i in range(n_layers):
        p, a = f"layers.{i}", f"layers.{i}.self_attn"
        w[f"{p}.input_layernorm.weight"] = norm(HIDDEN)
        w[f"{p}.post_attention_layernorm.weight"] = norm(HIDDEN)
        w[f"{a}.q_proj.weight"] = matrix(HEADS * HEAD_DIM * (2 if gated else 1), HIDDEN)
        w[f"{a}.k_proj.weight"] = matrix(KV * HEAD_DIM, HIDDEN)
        if not k_eq_v:
            w[f"{a}.v_proj.weight"] = matrix(KV * HEAD_DIM, HIDDEN)
        w[f"{a}.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        w[f"{a}.q_norm.weight"], w[f"{a}.k_norm.weight"] = norm(HEAD_DIM), norm(HEAD_DIM)
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            w[f"{p}.mlp.{name}.weight"] = matrix(*shape)
        if gemma:
            w[f"{p}.pre_feedforward_layernorm.weight"] = norm(HIDDEN)
            w[f"{p}.post_feedforward_layernorm.weight"] = norm(HIDDEN)
            w[f"{p}.layer_scalar"] = np.array([0.8])
        if sinks:
            w[f"{a}.attention_sink_bias"] = rng.normal(size=HEADS)
        if bias:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                n_out = w[f"{a}.{name}.weight"].shape[0]
                w[f"{a}.{name}.bias"] = 0.3 * rng.normal(size=n_out)
    return w


def own_ends(
    rng: np.random.Generator, n_draft: int = VOCAB, *, embed: bool = True, head: bool = True
) -> Tensors:
    """An embedding table and an lm_head of the head's own."""
    w: Tensors = {}
    if embed:
        w["embed_tokens.weight"] = rng.normal(size=(VOCAB, HIDDEN))
    if head:
        w["lm_head.weight"] = rng.normal(0, 0.5, (n_draft, HIDDEN))
    return w


def markov_tensors(
    rng: np.random.Generator,
    kind: str = "vanilla",
    *,
    n_draft: int = VOCAB,
    confidence: str | None = "markov",
) -> Tensors:
    """Markov head, and a confidence head that reads "markov" or only the "hidden" row."""
    w: Tensors = {
        "markov_head.markov_w1.weight": rng.normal(size=(VOCAB, RANK)),
        "markov_head.markov_w2.weight": rng.normal(size=(n_draft, RANK)),
    }
    if kind == "gated":
        w["markov_head.gate_proj.weight"] = rng.normal(0, 0.2, (RANK, HIDDEN + RANK))
        w["markov_head.gate_proj.bias"] = rng.normal(size=RANK)
    if kind == "rnn":
        w["markov_head.joint_proj.weight"] = rng.normal(0, 0.2, (3 * RANK, 2 * RANK + HIDDEN))
        w["markov_head.joint_proj.bias"] = rng.normal(size=3 * RANK)
    if confidence is not None:
        n_in = HIDDEN + (RANK if confidence == "markov" else 0)
        w["confidence_head.proj.weight"] = rng.normal(0, 0.2, (1, n_in))
        w["confidence_head.proj.bias"] = rng.normal(size=1)
    return w


def reduced_vocab(rng: np.random.Generator, n_draft: int) -> np.ndarray:
    """d2t: offsets from draft ids to n_draft different target ids."""
    ids = np.sort(rng.permutation(VOCAB)[:n_draft])
    return ids - np.arange(n_draft)


def config(**extra: Any) -> dict[str, Any]:
    """The backbone's keys, as every packaging has them."""
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_theta": 1e6,
        **extra,
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors, *, n_shards: int = 1) -> Path:
    """Write config.json and one or more safetensors files; integers keep their type."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {
        name: mx.array(value.astype(np.int64 if value.dtype.kind == "i" else np.float32))
        if value.dtype.kind in "if"
        else mx.array(value)
        for name, value in tensors.items()
    }
    names = sorted(arrays)
    if n_shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        return folder
    weight_map = {}
    for shard in range(n_shards):
        file = f"model-{shard + 1:05}-of-{n_shards:05}.safetensors"
        part = {name: arrays[name] for name in names[shard::n_shards]}
        mx.save_safetensors(str(folder / file), part)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder
