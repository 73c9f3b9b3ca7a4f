import gguf
import pytest

from spec_convert.config import end_token_ids, generation_config, model_config
from spec_convert.container import Container, TensorInfo
from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata
from spec_convert.names import ARCHITECTURES

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


def container(values, **shapes):
    tensors = tuple(
        TensorInfo(name.replace("__", "."), Kind.F32, shape, 0, 0) for name, shape in shapes.items()
    )
    return Container(3, 32, Metadata(values), tensors, 0, 0)


def llama_config(tiny_metadata, **shapes):
    shapes = {"token_embd__weight": (269, 64)} | shapes
    return model_config(ARCHITECTURES["llama"], container(tiny_metadata, **shapes))


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
    config = model_config(
        ARCHITECTURES["gemma3"], container(GEMMA, token_embd__weight=(262144, 640))
    )
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
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
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
    with pytest.raises(ConvertError, match="must be positive, got 0 and 64"):
        llama_config(tiny_metadata | {"llama.attention.head_count": 0})
    with pytest.raises(ConvertError, match='"token_embd.weight", which is missing'):
        model_config(ARCHITECTURES["llama"], container(tiny_metadata))


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
