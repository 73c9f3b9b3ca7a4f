"""A Bonsai-style DSpark GGUF, converted, drafts the tokens of the head it was written from."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from spec_convert import convert
from spec_core import FixedCap, Pair, generate
from spec_drafters import load_drafter
from spec_targets import MlxTarget
from spec_targets.load import family_for
from spec_targets.tiny import VOCAB, tiny_config, tiny_model

H, HEADS, KV, HEAD, FFN, RANK, LAYERS = 32, 4, 2, 8, 64, 32, 2
TAPS = (0, 1)
MATRICES = {
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD, H)),
    "self_attn.k_proj": ("attn_k", (KV * HEAD, H)),
    "self_attn.v_proj": ("attn_v", (KV * HEAD, H)),
    "self_attn.o_proj": ("attn_output", (H, HEADS * HEAD)),
    "mlp.gate_proj": ("ffn_gate", (FFN, H)),
    "mlp.up_proj": ("ffn_up", (FFN, H)),
    "mlp.down_proj": ("ffn_down", (H, FFN)),
    "input_layernorm": ("attn_norm", (H,)),
    "post_attention_layernorm": ("ffn_norm", (H,)),
    "self_attn.q_norm": ("attn_q_norm", (HEAD,)),
    "self_attn.k_norm": ("attn_k_norm", (HEAD,)),
}
TOP = {
    "fc.weight": ("dspark.fc.weight", (H, len(TAPS) * H)),
    "hidden_norm.weight": ("dspark.hidden_norm.weight", (H,)),
    "norm.weight": ("output_norm.weight", (H,)),
    "embed_tokens.weight": ("token_embd.weight", (VOCAB, H)),
    "lm_head.weight": ("output.weight", (VOCAB, H)),
    "markov_head.markov_w1.weight": ("dspark.markov_head_a.weight", (VOCAB, RANK)),
    "markov_head.markov_w2.weight": ("dspark.markov_head_b.weight", (VOCAB, RANK)),
    "confidence_head.proj.weight": ("dspark.confidence_head.weight", (1, H + RANK)),
    "confidence_head.proj.bias": ("dspark.confidence_head.bias", (1,)),
    "log_snr_embed.fc1.weight": ("dspark.log_snr_fc1.weight", (H, 128)),
    "log_snr_embed.fc1.bias": ("dspark.log_snr_fc1.bias", (H,)),
    "log_snr_embed.fc2.weight": ("dspark.log_snr_fc2.weight", (H, H)),
    "log_snr_embed.fc2.bias": ("dspark.log_snr_fc2.bias", (H,)),
}


def names() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Native name -> (GGUF name, shape)."""
    layers = {
        f"layers.{index}.{name}.weight": (f"blk.{index}.{target}.weight", shape)
        for index in range(LAYERS)
        for name, (target, shape) in MATRICES.items()
    }
    return TOP | layers


def random_weights() -> dict[str, np.ndarray]:
    """Values that bfloat16 holds exactly."""
    random = np.random.default_rng(4)
    weights = {}
    for name, (_, shape) in names().items():
        values = random.normal(size=shape) * 2 * shape[-1] ** -0.5
        values = values if len(shape) > 1 or "norm" not in name else 1 + values / 8
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        weights[name] = bits.view(np.float32)
    return weights


def write_native(folder: Path, weights: dict[str, np.ndarray]) -> Path:
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "rope_theta": 1e7,
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": list(TAPS),
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "log_snr_conditioning": True,
        "min_log_snr": -9.0,
        "max_log_snr": 9.0,
    }
    folder.mkdir()
    arrays = {name: mx.array(value).astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "dspark")
    whole = {
        "block_count": LAYERS,
        "embedding_length": H,
        "feed_forward_length": FFN,
        "context_length": 4096,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD,
        "dspark.block_size": 4,
        "dspark.mask_token_id": 3,
        "dspark.markov_rank": RANK,
    }
    for key, value in whole.items():
        writer.add_uint32(f"dspark.{key}", value)
    writer.add_array("dspark.dspark.target_layers", list(TAPS))
    for key, value in {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "dspark.min_log_snr": -9.0,
        "dspark.max_log_snr": 9.0,
    }.items():
        writer.add_float32(f"dspark.{key}", value)
    for key in ("confidence_head", "confidence_head_with_markov", "log_snr_conditioning"):
        writer.add_bool(f"dspark.dspark.{key}", True)
    writer.add_string("tokenizer.ggml.model", "none")
    kind = gguf.GGMLQuantizationType.BF16
    for name, value in weights.items():
        stored = value[0] if "confidence" in name and value.ndim == 2 else value
        target = names()[name][0]
        if stored.ndim == 1:
            writer.add_tensor(target, np.ascontiguousarray(stored))
        else:
            writer.add_tensor(target, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class Recorder:
    """Passes calls on to a drafter and keeps what it drafts."""

    drafter: Any
    drafts: list[list[int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, *args: Any, **settings: Any) -> Any:
        draft = self.drafter.draft(*args, **settings)
        self.drafts.append(draft.tokens.tolist())
        return draft


def drafts_of(folder: Path, target: MlxTarget) -> list[list[int]]:
    recorder = Recorder(load_drafter(folder, target, mode="dspark", bits=16))
    rounds = generate(Pair(target, recorder), [5, 9, 2, 7, 11], max_tokens=40, cap=FixedCap(4))
    assert sum(len(round_.tokens) for round_ in rounds) == 40
    return recorder.drafts


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_converted_head_drafts_the_same_tokens(tmp_path, dtype):
    weights = random_weights()
    native = write_native(tmp_path / "native", weights)
    source = write_gguf(tmp_path / "head.gguf", weights)
    assert convert(source, tmp_path / "converted", dtype=dtype).lossless
    assert tiny_config("qwen3")["hidden_size"] == H
    target = MlxTarget(tiny_model("qwen3"), family_for("qwen3"), "qwen3")
    expected = drafts_of(native, target)
    assert len({tuple(draft) for draft in expected}) > 5  # otherwise nothing was shown
    assert drafts_of(tmp_path / "converted", target) == expected
