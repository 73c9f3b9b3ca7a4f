"""Every family there and back: MLX model, GGUF by llama.cpp's rules, conversion, same model."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from spec_convert import ConvertError, convert, verify
from spec_convert.container import read_container
from spec_convert.facts import Facts
from spec_convert.families import ARCHITECTURES
from spec_convert.metadata import Metadata
from spec_convert.plan import Options, make_plan

Kind = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]
Rule = Callable[[str, Array], Array]
N_VOCAB = 269
IDS = [1, 5, 9, 200, 260, 3, 3, 77]
BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "vocab_size": N_VOCAB,
    "max_position_embeddings": 128, "rope_theta": 5000.0, "tie_word_embeddings": True,
}  # fmt: skip
KEYS = {
    "context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
    "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}  # fmt: skip


def unchanged(name: str, value: Array) -> Array:
    return value


def interleave(value: Array, n_heads: int) -> Array:
    halves = value.reshape(n_heads, 2, len(value) // n_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(value.shape)


def llama_rule(name: str, value: Array) -> Array:
    if "q_proj" in name or "k_proj" in name:
        return interleave(value, 4 if "q_proj" in name else 2)
    return value


def gemma_rule(name: str, value: Array) -> Array:
    return value + 1 if name.endswith("norm.weight") else value


def tile_heads(value: Array, skipped: int, width: int) -> Array:
    """Four value heads over two key heads: grouped becomes tiled."""
    heads = value[skipped:].reshape(2, 2, width, *value.shape[1:]).swapaxes(0, 1)
    return np.concatenate([value[:skipped], heads.reshape(-1, *value.shape[1:])])


def qwen35_rule(name: str, value: Array) -> Array:
    if name.endswith("A_log"):
        return tile_heads(-np.exp(value), 0, 1)
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tile_heads(value, 0, 1)
    if name.endswith("in_proj_z.weight"):
        return tile_heads(value, 0, 32)
    if name.endswith("in_proj_qkv.weight"):
        return tile_heads(value, 2 * 2 * 32, 32)
    if name.endswith("conv1d.weight"):
        return tile_heads(value[..., 0], 2 * 2 * 32, 32)
    if name.endswith("linear_attn.out_proj.weight"):
        return tile_heads(value.T, 0, 32).T
    if name.endswith("shared_expert_gate.weight"):
        return value[0]
    return value


def nemotron_rule(name: str, value: Array) -> Array:
    if name.endswith("A_log"):
        return -np.exp(value)[:, None]
    if name.endswith("mixer.D"):
        return value[:, None]
    if name.endswith("conv1d.weight"):
        return value[..., 0]
    if name.endswith("mixer.norm.weight"):
        return value.reshape(2, -1)
    return llama_rule(name, value)


def lfm2_rule(name: str, value: Array) -> Array:
    return value[..., 0] if name.endswith("conv.conv.weight") else value


def split_patterns(n_layers: int, pattern: list[bool]) -> list[bool]:
    return [pattern[index % len(pattern)] for index in range(n_layers)]


EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
EXPERT_ARGS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
QWEN35_ARGS = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {
        "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 5000.0,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
QWEN35_KEYS = {
    "block_count": 4, "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 128, "full_attention_interval": 4,
    "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
NEMOTRON_ARGS = {
    "attention_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_proj_bias": False,
    "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2, "mlp_bias": False,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 128,
    "ssm.time_step_rank": 4, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip

# GGUF name -> (mlx-lm module, changes of the model's settings, changes of the keys, value rule)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Rule]] = {
    "llama": ("llama", {}, {}, llama_rule),
    "llama-untied-biased": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True},
        {},
        llama_rule,
    ),
    "llama-linear-rope": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        llama_rule,
    ),
    "llama-mixtral": (
        "mixtral",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "tie_word_embeddings": False},
        {
            "attention.key_length": 16, "attention.value_length": 16, "expert_count": 4,
            "expert_used_count": 2,
        },
        llama_rule,
    ),
    "mistral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 16.0,
                "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.25,
            },
        },
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.25,
        },
        llama_rule,
    ),
    "qwen2": (
        "qwen2",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16},
        unchanged,
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}, {}, unchanged),
    "qwen3moe": ("qwen3_moe", EXPERT_ARGS, EXPERT_KEYS, unchanged),
    "gemma2": (
        "gemma2",
        {
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
        gemma_rule,
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "sliding_window": 4},
        {"block_count": 7, "attention.sliding_window": 4},
        gemma_rule,
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 4,
            "global_partial_rotary_factor": 0.25, "vocab_size_per_layer_input": N_VOCAB,
            "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 32,
            "use_double_wide_mlp": True, "final_logit_softcapping": 20.0,
            "layer_types": [*["sliding_attention", "full_attention"] * 2],
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 5000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        {
            "block_count": 4, "feed_forward_length": [96, 96, 96, 192],
            "attention.sliding_window": 4, "attention.shared_kv_layers": 1,
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.key_length_swa": 16, "attention.value_length_swa": 16,
            "embedding_length_per_layer_input": 32, "final_logit_softcapping": 20.0,
        },
        unchanged,
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "num_hidden_layers": 2, "head_dim": 32, "global_head_dim": 32, "sliding_window": 4,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False, "final_logit_softcapping": 20.0,
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 32, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 5000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        {
            "attention.sliding_window": 4, "attention.head_count_kv": [2, 1],
            "attention.sliding_window_pattern": [True, False], "attention.shared_kv_layers": 0,
            "attention.key_length_swa": 32, "attention.value_length_swa": 32,
            "embedding_length_per_layer_input": 0, "final_logit_softcapping": 20.0, **EXPERT_KEYS,
        },
        unchanged,
    ),
    "qwen35": ("qwen3_5", QWEN35_ARGS, QWEN35_KEYS, qwen35_rule),
    "qwen35moe": (
        "qwen3_5_moe",
        QWEN35_ARGS | EXPERT_ARGS | {"shared_expert_intermediate_size": 32},
        QWEN35_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 32},
        qwen35_rule,
    ),
    "lfm2": (
        "lfm2",
        {
            "head_dim": 16, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
            "block_dim": 64, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False, "block_ff_dim": 96, "full_attn_idxs": [1],
        },
        {
            "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "attention.key_length": 16,
            "attention.value_length": 16,
        },
        lfm2_rule,
    ),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON_ARGS | {"num_hidden_layers": 3, "hybrid_override_pattern": "M*-"},
        NEMOTRON_KEYS
        | {
            "block_count": 3, "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": [0, 0, 96],
        },
        nemotron_rule,
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        NEMOTRON_ARGS
        | {
            "num_hidden_layers": 4, "hybrid_override_pattern": "M*EE", "n_routed_experts": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_latent_size": 32,
        },
        NEMOTRON_KEYS
        | {
            "block_count": 4, "attention.head_count_kv": [0, 2, 0, 0],
            "feed_forward_length": [0, 0, 32, 32], "expert_count": 4, "expert_shared_count": 1,
            "expert_used_count": 2, "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64, "expert_group_count": 1,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "moe_latent_size": 32,
        },
        nemotron_rule,
    ),
    "phi3": (
        "phi3",
        {"head_dim": 16, "tie_word_embeddings": False, "original_max_position_embeddings": 64},
        {
            "rope.scaling.original_context_length": 64, "rope.dimension_count": 16,
            "attention.key_length": 16, "attention.value_length": 16,
        },
        unchanged,
    ),
}  # fmt: skip


def random_model(module: str, settings: dict[str, Any]) -> Any:
    """A model of mlx-lm with random weights of moderate size."""
    code = importlib.import_module(f"mlx_lm.models.{module}")
    model = code.Model(code.ModelArgs.from_dict(settings | {"model_type": module}))
    if module == "gemma3_text":
        model.sanitize({})  # ties the head
    random = np.random.default_rng(0)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        values = random.normal(size=value.shape) / 8
        if "norm" in name and value.ndim == 1 and "gemma" not in module:
            values = random.uniform(0.5, 1.5, value.shape)
        weights.append((name, mx.array(values.astype(np.float32))))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def gguf_name(arch: str, name: str, n_layers: int) -> str:
    """llama.cpp's own table, from the `gguf` package, for a Hugging Face name."""
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    name = name.replace("language_model.model.", "model.").replace("language_model.lm", "lm")
    name = name.replace("switch_mlp.", "experts.").replace(".dt_bias", ".dt_proj.bias")
    name = name.replace("experts.switch_glu.", "experts.")
    for mlx, file in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = name.replace(f"block_sparse_moe.experts.{mlx}", f"block_sparse_moe.experts.{file}")
    for mlx, file in (("fc1", "up_proj"), ("fc2", "down_proj")):  # Nemotron's stacked experts
        name = re.sub(rf"backbone(.*)mixer.experts.{mlx}\.", rf"model\1mlp.experts.{file}.", name)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("layer_scalar"):
        name += ".weight"
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    found = gguf.get_tensor_name_map(kinds[arch], n_layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def fused_experts(parameters: list[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """Gemma 4 stores the gate and up matrices of an expert one after the other."""
    weights = dict(parameters)
    for name in [name for name in weights if "switch_glu.gate_proj" in name]:
        up = weights.pop(name.replace("gate_proj", "up_proj"))
        both = mx.concatenate([weights.pop(name), up], axis=-2)
        weights[name.replace("gate_proj", "gate_up_proj")] = both
    return list(weights.items())


def logits(model: Any) -> Array:
    return np.array(model(mx.array([IDS])).astype(mx.float32))


def write_case(
    case: str, make_gguf: Callable[..., Path], vocabulary: dict[str, Any], kind: Kind = Kind.F32
) -> tuple[Any, Path]:
    module, settings, keys, rule = CASES[case]
    arch = case.split("-")[0]
    settings = BASE | settings
    model = random_model(module, settings)
    tensors = {}
    for name, value in fused_experts(tree_flatten(model.parameters())):
        stored = np.ascontiguousarray(rule(name, np.array(value)).astype(np.float32))
        packs = stored.ndim > 1 and stored.shape[-1] % 32 == 0 and "conv" not in name
        target = gguf_name(arch, name, settings["num_hidden_layers"])
        tensors[target] = (stored, kind if packs else Kind.F32)
    if arch == "gemma4":  # a quarter of the pairs of a global head are rotated
        factors = np.array([1.0] * 4 + [1e30] * 12, np.float32)
        tensors["rope_freqs.weight"] = (factors, Kind.F32)
    metadata = {f"{arch}.{key}": value for key, value in (KEYS | keys).items()}
    return model, make_gguf(f"{case}.gguf", arch, tensors, metadata | vocabulary)


@pytest.fixture
def vocabulary(tiny_metadata):
    return {key: value for key, value in tiny_metadata.items() if key.startswith("tokenizer")}


@pytest.mark.parametrize("case", CASES)
def test_a_family_comes_back_as_it_was(case, make_gguf, vocabulary, tmp_path):
    model, source = write_case(case, make_gguf, vocabulary)
    report = convert(source, tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    original = dict(tree_flatten(model.parameters()))
    assert loaded.keys() == original.keys()
    for name, value in original.items():
        wanted = np.array(value)
        assert loaded[name].shape == wanted.shape, name
        if name.endswith("A_log"):
            np.testing.assert_allclose(loaded[name], wanted, rtol=0, atol=1e-6)
        elif "gemma" in case and name.endswith("norm.weight"):
            assert np.array_equal(loaded[name] + np.float32(1), wanted + np.float32(1)), name
        else:
            assert np.array_equal(loaded[name], wanted), name
    again, _ = load_model(tmp_path / "out")
    np.testing.assert_allclose(logits(again), logits(model), rtol=0, atol=2e-5)
    assert all(result.within for result in verify(tmp_path / "out", source))
    assert report.architecture == case.split("-")[0]


@pytest.mark.parametrize(
    "case",
    [
        "llama", "llama-mixtral", "qwen3moe", "qwen35", "lfm2", "nemotron_h", "nemotron_h_moe",
        "gemma3",
    ],
)  # fmt: skip
def test_a_quantised_family_computes_what_its_dequantised_twin_computes(
    case, make_gguf, vocabulary, tmp_path
):
    _, source = write_case(case, make_gguf, vocabulary, Kind.Q8_0)
    convert(source, tmp_path / "packed")
    convert(source, tmp_path / "plain", dtype="f32")
    assert all(result.within for result in verify(tmp_path / "packed", source))
    packed, plain = (load_model(tmp_path / name)[0] for name in ("packed", "plain"))
    assert any(name.endswith("scales") for name, _ in tree_flatten(packed.parameters()))
    np.testing.assert_allclose(logits(packed), logits(plain), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["gemma2", "lfm2"])
def test_an_output_table_that_a_tied_model_cannot_use_is_dropped_whatever_its_type(
    case, make_gguf, vocabulary, tmp_path
):
    model, source = write_case(case, make_gguf, vocabulary)
    reader = gguf.GGUFReader(source)
    arch = case.split("-")[0]
    tensors = {tensor.name: (np.array(tensor.data), Kind.F32) for tensor in reader.tensors}
    # Q8_K serves computations alone and has no dequantiser: 292 bytes for each 256 values.
    with pytest.raises(NotImplementedError):
        gguf.quants.dequantize(np.zeros((1, 292), np.uint8), Kind.Q8_K)
    tensors["output.weight"] = (np.zeros((N_VOCAB, 292), np.uint8), Kind.Q8_K)
    keys = {f"{arch}.{key}": value for key, value in (KEYS | CASES[case][2]).items()}
    untied = make_gguf("untied.gguf", arch, tensors, keys | vocabulary)
    report = convert(untied, tmp_path / "out")
    assert report.dropped == ("output.weight",) and report.lossless
    again, _ = load_model(tmp_path / "out")
    np.testing.assert_allclose(logits(again), logits(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_any_key_with_an_absurd_value_is_refused_or_harmless(case, make_gguf, vocabulary):
    _, source = write_case(case, make_gguf, vocabulary)
    with source.open("rb") as file:
        container = read_container(file, source.stat().st_size)
    arch = case.split("-")[0]
    architecture = ARCHITECTURES[arch]
    keys = [key for key in container.metadata.values if key.startswith(f"{arch}.")]
    refused = 0
    for key in keys:
        for value in (0, 1, 7, (1 << 32) - 1, -1, 0.0, float("nan"), "text", True, np.zeros(0)):
            changed = Metadata({**container.metadata.values, key: value})
            facts = Facts(replace(container, metadata=changed), lambda name: [1.0] * 16)
            try:
                architecture.config(facts)
                make_plan(facts.container, architecture, facts, Options())
            except ConvertError as error:
                refused += 1
                assert str(error).isprintable()
    assert refused > 3 * len(keys)
