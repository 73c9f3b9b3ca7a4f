import math

import gguf
import pytest

from spec_convert.config import end_token_ids, generation_config
from spec_convert.container import Container, TensorInfo
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families import ARCHITECTURES
from spec_convert.metadata import Metadata

Kind = gguf.GGMLQuantizationType
GEMMA = {
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
}


def config_of(arch, values, vectors=None, **shapes):
    """`config.json` for a header with tensors of these shapes; "__" stands for a dot."""
    tensors = tuple(
        TensorInfo(name.replace("__", "."), Kind.F32, shape, 0, 0) for name, shape in shapes.items()
    )
    padding = tuple(TensorInfo(f"x{index}", Kind.F32, (1,), 0, 0) for index in range(20))
    values = {"general.architecture": arch, **values}
    container = Container(3, 32, Metadata(values), tensors + padding, 0, 0)
    return ARCHITECTURES[arch].config(Facts(container, lambda name: (vectors or {})[name]))


def llama_config(tiny_metadata, **shapes):
    return config_of("llama", tiny_metadata, **({"token_embd__weight": (269, 64)} | shapes))


def test_llama_keys_carry_the_files_values(tiny_metadata):
    config = llama_config(tiny_metadata | {"llama.rope.freq_base": 100000.0})
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": 269,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": tiny_metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": tiny_metadata["tokenizer.ggml.eos_token_id"],
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_scaling" not in config


def test_an_output_tensor_unties_the_embedding(tiny_metadata):
    config = llama_config(tiny_metadata, output__weight=(269, 64), blk__0__attn_q__bias=(64,))
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_gemma3_keys_that_no_file_states_are_filled_in():
    config = config_of("gemma3", GEMMA, token_embd__weight=(262144, 640))
    expected = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
    }
    assert {key: config[key] for key in expected} == expected


def test_rope_scaling_is_carried_over(tiny_metadata):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    config = llama_config(tiny_metadata | linear)
    assert config["rope_scaling"] == {
        "rope_type": "linear",
        "type": "linear",
        "factor": 8.0,
    }
    with pytest.raises(ConvertError, match=r'"llama.rope.scaling.type" must be .* got "new"'):
        llama_config(tiny_metadata | linear | {"llama.rope.scaling.type": "new"})


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_a_missing_key_is_refused_by_name(tiny_metadata, key):
    del tiny_metadata[f"llama.{key}"]
    with pytest.raises(ConvertError, match=f'"llama.{key}", which is missing'):
        llama_config(tiny_metadata)


def test_sizes_that_contradict_the_tensors_are_refused(tiny_metadata):
    with pytest.raises(ConvertError, match="must hold 64 values, got 32"):
        llama_config(tiny_metadata, token_embd__weight=(269, 32))
    with pytest.raises(ConvertError, match='"llama.attention.head_count" must be positive, got 0'):
        llama_config(tiny_metadata | {"llama.attention.head_count": 0})
    with pytest.raises(ConvertError, match='"token_embd.weight", which is missing'):
        config_of("llama", tiny_metadata)


def test_every_end_token_is_listed_once():
    metadata = Metadata(
        {
            "tokenizer.ggml.bos_token_id": 5,
            "tokenizer.ggml.eos_token_id": 7,
            "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.eom_token_id": 7,
        }
    )
    assert end_token_ids(metadata) == [7, 9]
    assert generation_config(metadata)["eos_token_id"] == [7, 9]
    assert generation_config(metadata)["bos_token_id"] == 5
    assert "pad_token_id" not in generation_config(metadata)


def llama3_factors(factor=8.0, theta=500000.0, head_dim=16):
    """The rule of `LlamaModel.generate_extra_tensors`: fade between wavelengths 2048 and 8192."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < 2048:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def test_llama3_scaling_is_recovered_from_its_factors(tiny_metadata):
    values = tiny_metadata | {"llama.rope.freq_base": 500000.0}
    stored = {"rope_freqs.weight": llama3_factors()}
    shapes = {"token_embd__weight": (269, 64), "rope_freqs__weight": (8,)}
    assert config_of("llama", values, stored, **shapes)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stored["rope_freqs.weight"][4] *= 1.01
    with pytest.raises(ConvertError, match='"rope_freqs.weight" must follow the Llama 3 rule'):
        config_of("llama", values, stored, **shapes)


def test_phi3_long_and_short_factors_go_into_the_config(tiny_metadata):
    values = {key.replace("llama.", "phi3."): value for key, value in tiny_metadata.items()}
    values["general.architecture"] = "phi3"
    long, short = "rope_factors_long.weight", "rope_factors_short.weight"
    shapes = {"token_embd__weight": (269, 64), "rope_factors_long__weight": (8,)}
    config = config_of("phi3", values, {long: [2.0] * 8, short: [1.0] * 8}, **shapes)
    assert config["rope_scaling"]["long_factor"] == [2.0] * 8
    assert config["rope_scaling"]["short_factor"] == [1.0] * 8


def test_multi_token_prediction_layers_are_not_counted(tiny_metadata):
    config = llama_config(tiny_metadata | {"llama.nextn_predict_layers": 1})
    assert config["num_hidden_layers"] == 1


def test_an_absurd_layer_count_is_refused(tiny_metadata):
    with pytest.raises(ConvertError, match='"llama.block_count" must be 1 to .* got 4294967295'):
        llama_config(tiny_metadata | {"llama.block_count": 4294967295})
