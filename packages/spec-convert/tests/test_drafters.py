"""Drafter files written here by the rules of their converters, and the layouts they come from."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from spec_convert import ConvertError, convert, verify
from spec_convert.tensorfile import TensorFolder

Kind = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]
H, HEADS, KV, HEAD, FFN, V, RANK, TAPS = 64, 4, 2, 32, 96, 128, 32, 3
KEYS = {
    "block_count": 2, "embedding_length": H, "feed_forward_length": FFN, "context_length": 512,
    "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
BONSAI = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "fc": "dspark.fc",
    "hidden_norm": "dspark.hidden_norm", "markov_head.markov_w1": "dspark.markov_head_a",
    "markov_head.markov_w2": "dspark.markov_head_b",
    "confidence_head.proj": "dspark.confidence_head",
    "log_snr_embed.fc1": "dspark.log_snr_fc1", "log_snr_embed.fc2": "dspark.log_snr_fc2",
}  # fmt: skip
DFLASH = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm", "fc": "fc",
    "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
    "log_snr_embed.fc1": "log_snr_fc1", "log_snr_embed.fc2": "log_snr_fc2",
}  # fmt: skip


def backbone_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc": (H, TAPS * H), "norm": (H,), "hidden_norm": (H,)}
    for index in range(2):
        layer = {
            "input_layernorm": (H,), "post_attention_layernorm": (H,),
            "self_attn.q_proj": (HEADS * HEAD, H), "self_attn.k_proj": (KV * HEAD, H),
            "self_attn.v_proj": (KV * HEAD, H), "self_attn.o_proj": (H, HEADS * HEAD),
            "self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,),
            "mlp.gate_proj": (FFN, H), "mlp.up_proj": (FFN, H), "mlp.down_proj": (H, FFN),
        }  # fmt: skip
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_bfloat16(shape: tuple[int, ...], seed: int) -> Array:
    """Values that bfloat16 holds exactly, as float32."""
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def dspark_weights() -> dict[str, Array]:
    shapes = {f"{name}.weight": shape for name, shape in backbone_shapes().items()}
    shapes |= {
        "embed_tokens.weight": (V, H), "lm_head.weight": (V, H),
        "markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK),
        "confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,),
        "log_snr_embed.fc1.weight": (H, 128), "log_snr_embed.fc1.bias": (H,),
        "log_snr_embed.fc2.weight": (H, H), "log_snr_embed.fc2.bias": (H,),
    }  # fmt: skip
    return {name: random_bfloat16(shape, i) for i, (name, shape) in enumerate(shapes.items())}


def renamed(weights: dict[str, Array], top: dict[str, str], kind: Kind = Kind.BF16):
    """GGUF names; matrices as `kind`, vectors as F32, the confidence row flattened."""
    tensors = {}
    for name, value in weights.items():
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            target = f"blk.{index}.{LAYER[part]}.{suffix}"
        else:
            target = f"{top[stem]}.{suffix}"
        stored = value[0] if "confidence" in name and value.ndim == 2 else value
        packs = stored.ndim == 2 and "log_snr" not in name
        tensors[target] = (stored, kind if packs else Kind.F32)
    return tensors


def bonsai_keys() -> dict[str, Any]:
    keys: dict[str, Any] = {f"dspark.{key}": value for key, value in KEYS.items()}
    nested = {
        "block_size": 4, "mask_token_id": 127, "target_layers": [1, 16, 31], "markov_rank": RANK,
        "confidence_head": True, "confidence_head_with_markov": True,
        "log_snr_conditioning": True, "min_log_snr": -9.0, "max_log_snr": 9.0,
    }  # fmt: skip
    keys |= {f"dspark.dspark.{key}": value for key, value in nested.items()}
    return keys | {"tokenizer.ggml.model": "none"}


def loaded(folder: Path) -> dict[str, Array]:
    """Every tensor of a folder as float32 or integers."""
    values = {}
    with TensorFolder(folder) as tensors:
        for name, stored in tensors.tensors.items():
            n_rows = int(np.prod(stored.shape[:-1]))
            rows = stored.rows(0, n_rows).reshape(stored.shape)
            if stored.tag == "BF16":
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            values[name] = rows
    return values


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_bonsai_file_becomes_the_native_layout(make_gguf, tmp_path):
    weights = dspark_weights()
    source = make_gguf("b.gguf", "dspark", renamed(weights, BONSAI), bonsai_keys())
    report = convert(source, tmp_path / "out")
    assert report.lossless
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    got = loaded(tmp_path / "out")
    assert got.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(got[name], value), name
    expected = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": H,
        "num_hidden_layers": 2, "intermediate_size": FFN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": HEAD, "vocab_size": V, "rope_theta": 1e7,
        "rms_norm_eps": 1e-6, "block_size": 4, "mask_token_id": 127,
        "target_layer_ids": [1, 16, 31], "markov_rank": RANK, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
        "tie_word_embeddings": False, "log_snr_conditioning": True, "min_log_snr": -9.0,
        "max_log_snr": 9.0,
    }  # fmt: skip
    config = config_of(tmp_path / "out")
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}
    assert all(result.max_error == 0 for result in verify(tmp_path / "out", source))


def test_a_uniform_bfloat16_repack_of_a_bonsai_file_is_exact(make_gguf, tmp_path):
    source = make_gguf("b.gguf", "dspark", renamed(dspark_weights(), BONSAI), bonsai_keys())
    report = convert(source, tmp_path / "out", dtype="bf16")
    assert report.lossless
    assert {tensor.layout for tensor in report.tensors} == {"BF16"}


def test_quantised_drafter_matrices_keep_their_codes(make_gguf, tmp_path):
    tensors = renamed(dspark_weights(), BONSAI, Kind.Q4_1)
    source = make_gguf("b.gguf", "dspark", tensors, bonsai_keys())
    assert convert(source, tmp_path / "out").lossless
    names = loaded(tmp_path / "out").keys()
    assert "layers.0.mlp.up_proj.scales" in names and "log_snr_embed.fc1.scales" not in names
    quantization = config_of(tmp_path / "out")["quantization"]
    assert quantization == {"group_size": 32, "bits": 4, "mode": "affine"}


def dflash_keys(**changes: Any) -> dict[str, Any]:
    keys = KEYS | {
        "block_size": 8, "target_layers": [2, 17, 32], "target_hidden_size": H,
        "attention.sliding_window": 2048, "attention.sliding_window_pattern": [True, False],
    }  # fmt: skip
    keys |= changes
    metadata = {f"dflash.{key}": value for key, value in keys.items() if value is not None}
    return metadata | {"tokenizer.ggml.mask_token_id": 99}


def without_markov(weights: dict[str, Array]) -> dict[str, Array]:
    extras = ("markov", "confidence", "log_snr", "embed_tokens", "lm_head")
    return {name: value for name, value in weights.items() if not name.startswith(extras)}


def test_a_dflash_file_states_taps_by_the_layer_they_enter(make_gguf, tmp_path):
    weights = without_markov(dspark_weights())
    vocabulary = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(V)]}
    keys = dflash_keys() | vocabulary
    source = make_gguf("d.gguf", "dflash", renamed(weights, DFLASH), keys)
    convert(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert got.keys() == weights.keys()
    assert all(np.array_equal(got[name], value) for name, value in weights.items())
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 99, "target_layer_ids": [1, 16, 31]}
    assert config["block_size"] == 8 and config["vocab_size"] == V
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 2048 and config["is_causal"] is False


def test_early_dflash_files_state_taps_as_they_are(make_gguf, tmp_path):
    keys = dflash_keys(mask_token_id=98) | {"tokenizer.ggml.tokens": ["a"] * 4}
    tensors = renamed(without_markov(dspark_weights()), DFLASH)
    convert(make_gguf("d.gguf", "dflash", tensors, keys), tmp_path / "out")
    nested = config_of(tmp_path / "out")["dflash_config"]
    assert nested == {"mask_token_id": 98, "target_layer_ids": [2, 17, 32]}


def test_markov_tensors_make_a_dflash_file_a_dspark_head(make_gguf, tmp_path):
    weights = dspark_weights()
    keys = dflash_keys(log_snr_conditioning=True, min_log_snr=-9.0, max_log_snr=9.0)
    source = make_gguf("d.gguf", "dflash", renamed(weights, DFLASH), keys)
    convert(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert all(np.array_equal(got[name], value) for name, value in weights.items())
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["target_layer_ids"] == [1, 16, 31] and config["mask_token_id"] == 99
    assert config["sample_from_anchor"] is True and config["markov_rank"] == RANK


def test_selector_tensors_make_a_dflash_file_a_dflash2_head(make_gguf, tmp_path):
    weights = without_markov(dspark_weights())
    tensors = renamed(weights, DFLASH)
    extra = {
        "selector_hidden.weight": random_bfloat16((32, H), 50),
        "selector_predecessor.weight": random_bfloat16((V, 32), 51),
        "selector_successor.weight": random_bfloat16((V, 32), 52),
    }
    for index in range(2):
        for side in ("attn", "ffn"):
            extra[f"blk.{index}.{side}_conv_base"] = random_bfloat16((2, 2, H), 60 + index)
            projection = random_bfloat16((2 * 2 * 4, H), 70 + index)
            extra[f"blk.{index}.{side}_conv_proj.weight"] = projection
    tensors |= {name: (value, Kind.BF16) for name, value in extra.items()}
    keys = dflash_keys(
        conv_kernel_size=2, conv_group_size=16, selector_rank=32, selector_top_k=4, logit_scale=0.5,
        final_logit_softcapping=20.0,
    )  # fmt: skip
    keys["tokenizer.ggml.tokens"] = [f"t{index}" for index in range(V)]
    convert(make_gguf("d.gguf", "dflash", tensors, keys), tmp_path / "out")
    got = loaded(tmp_path / "out")
    successor = got["candidate_selector.successor_codebook"]
    assert np.array_equal(successor, extra["selector_successor.weight"])
    kernel = got["layers.1.attention_conv.base_kernel"]
    assert kernel.shape == (2, 2, H) and np.array_equal(kernel, extra["blk.1.attn_conv_base"])
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["dflash_config"]["selector_top_k"] == 4
    assert config["dflash_config"]["output_multiplier"] == 0.5
    assert config["dflash_config"]["final_logit_softcapping"] == 20.0


def eagle3_tensors() -> tuple[dict[str, Array], dict[str, tuple[Array, Kind]]]:
    shapes = {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (V // 2, H),
        "midlayer.input_layernorm.weight": (H,), "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * HEAD, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * HEAD, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * HEAD),
        "midlayer.mlp.gate_proj.weight": (FFN, H), "midlayer.mlp.up_proj.weight": (FFN, H),
        "midlayer.mlp.down_proj.weight": (H, FFN),
    }  # fmt: skip
    weights = {name: random_bfloat16(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    top = {"fc": "fc", "norm": "output_norm", "lm_head": "output"}
    names = LAYER | {"hidden_norm": "attn_norm_2"}
    tensors = {}
    for name, value in weights.items():
        stem, _, suffix = name.rpartition(".")
        part = stem.removeprefix("midlayer.")
        target = f"blk.0.{names[part]}" if part != stem else top[stem]
        stored = value
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV
            halves = value.reshape(heads, 2, HEAD // 2, -1)
            stored = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        tensors[f"{target}.{suffix}"] = (stored, Kind.BF16 if value.ndim == 2 else Kind.F32)
    return weights, tensors


def test_an_eagle3_file_becomes_the_published_layout(make_gguf, tmp_path):
    weights, tensors = eagle3_tensors()
    target_ids = np.sort(np.random.default_rng(3).choice(V, V // 2, replace=False)).astype(np.int64)
    tensors["d2t"] = (target_ids, Kind.I64)
    keys = {f"eagle3.{key}": value for key, value in (KEYS | {"block_count": 1}).items()}
    keys |= {
        "eagle3.extract_layers": [2, 16, 29], "eagle3.target_hidden_size": H,
        "eagle3.norm_before_residual": True,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(V)],
    }  # fmt: skip
    source = make_gguf("e.gguf", "eagle3", tensors, keys)
    convert(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert got.keys() == weights.keys() | {"d2t"}
    for name, value in weights.items():
        assert np.array_equal(got[name], value), name
    assert got["d2t"].dtype == np.int64
    assert np.array_equal(got["d2t"] + np.arange(V // 2), target_ids)
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == V // 2 and config["vocab_size"] == V
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]
    assert config["norm_before_residual"] is True
    assert all(result.max_error == 0 for result in verify(tmp_path / "out", source))


@pytest.mark.parametrize(
    ("arch", "missing", "words"),
    [
        ("dspark", "dspark.dspark.target_layers", "target_layers.*missing"),
        ("dspark", "dspark.dspark.mask_token_id", "mask_token_id.*missing"),
        ("dspark", "dspark.dspark.max_log_snr", "max_log_snr.*missing"),
        ("dflash", "dflash.target_layers", "must list layers from 1"),
        ("dflash", "tokenizer.ggml.mask_token_id", "mask_token_id.*missing"),
        ("dflash", "dflash.block_size", "block_size.*missing"),
    ],
)
def test_a_drafter_without_a_needed_key_is_refused_by_key(
    make_gguf, tmp_path, arch, missing, words
):
    keys = bonsai_keys() if arch == "dspark" else dflash_keys()
    del keys[missing]
    top = BONSAI if arch == "dspark" else DFLASH
    source = make_gguf("x.gguf", arch, renamed(dspark_weights(), top), keys)
    with pytest.raises(ConvertError, match=words):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target_ids", "words"),
    [
        (None, 'A draft vocabulary of 64 beside 128 .* needs the tensor "d2t"'),
        (np.arange(63), "must name 64 different target tokens, got 63 of 63"),
        (np.zeros(64, np.int64), "must name 64 different target tokens, got 1 of 64"),
        (np.arange(65, 129), "must name tokens 0 to 127, got 65 to 128"),
    ],
    ids=["absent", "short", "all zero", "out of range"],
)
def test_a_reduced_vocabulary_needs_a_right_map(make_gguf, tmp_path, target_ids, words):
    _, tensors = eagle3_tensors()
    if target_ids is not None:
        tensors["d2t"] = (target_ids.astype(np.int64), Kind.I64)
    keys = {f"eagle3.{key}": value for key, value in (KEYS | {"block_count": 1}).items()}
    keys |= {"eagle3.extract_layers": [2, 16, 29], "eagle3.target_hidden_size": H}
    keys["tokenizer.ggml.tokens"] = [f"t{index}" for index in range(V)]
    with pytest.raises(ConvertError, match=words):
        convert(make_gguf("e.gguf", "eagle3", tensors, keys), tmp_path / "out")


@pytest.mark.weights
def test_a_trained_drafter_survives_the_trip_through_gguf(make_gguf, tmp_path):
    root = os.environ.get("SPEC_REFERENCE_MODELS")
    if root is None:
        pytest.skip("SPEC_REFERENCE_MODELS names no folder")
    folder = Path(root) / "smollm2-135m-dspark-b7"
    original = loaded(folder)
    native = json.loads((folder / "config.json").read_text())
    keys = bonsai_keys() | {
        "dspark.block_count": native["num_hidden_layers"],
        "dspark.embedding_length": native["hidden_size"],
        "dspark.feed_forward_length": native["intermediate_size"],
        "dspark.attention.head_count": native["num_attention_heads"],
        "dspark.attention.head_count_kv": native["num_key_value_heads"],
        "dspark.attention.key_length": native["head_dim"],
        "dspark.attention.layer_norm_rms_epsilon": native["rms_norm_eps"],
        "dspark.rope.freq_base": native["rope_theta"],
        "dspark.dspark.block_size": native["block_size"],
        "dspark.dspark.mask_token_id": native["mask_token_id"],
        "dspark.dspark.target_layers": native["target_layer_ids"],
        "dspark.dspark.markov_rank": native["markov_rank"],
        "dspark.dspark.log_snr_conditioning": False,
    }
    source = make_gguf("t.gguf", "dspark", renamed(original, BONSAI), keys)
    convert(source, tmp_path / "out", dtype="bf16")
    got = loaded(tmp_path / "out")
    assert got.keys() == original.keys()
    assert all(np.array_equal(got[name], value) for name, value in original.items())
    config = config_of(tmp_path / "out")
    shared = native.keys() & config.keys() - {"max_position_embeddings"}
    assert {key: config[key] for key in shared} == {key: native[key] for key in shared}
    assert {"target_layer_ids", "mask_token_id", "block_size", "markov_rank"} <= shared
