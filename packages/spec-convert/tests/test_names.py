import pytest

from spec_convert.container import Container, TensorInfo
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families import ARCHITECTURES, architecture_of
from spec_convert.metadata import Metadata
from spec_convert.names import Change, Slot
from spec_convert.orders import Interleaved


def facts_of(arch, **keys):
    tensors = tuple(TensorInfo(f"x{i}", 0, (1,), 0, 0) for i in range(30))  # pyright: ignore
    values = {"general.architecture": arch, f"{arch}.block_count": 20}
    values |= {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return Facts(Container(3, 32, Metadata(values), tensors, 0, 0), lambda name: [])


LLAMA = ARCHITECTURES["llama"]
FACTS = facts_of("llama", attention__head_count=8, attention__head_count_kv=2)


def test_llama_tensors_get_their_hugging_face_names():
    embedding = Slot("model.embed_tokens.weight", embedding=True)
    assert LLAMA.slots("token_embd.weight", FACTS) == (embedding,)
    assert LLAMA.slots("output.weight", FACTS) == (Slot("lm_head.weight"),)
    down = Slot("model.layers.11.mlp.down_proj.weight")
    assert LLAMA.slots("blk.11.ffn_down.weight", FACTS) == (down,)
    norm = Slot("model.layers.0.post_attention_layernorm.weight")
    assert LLAMA.slots("blk.0.ffn_norm.weight", FACTS) == (norm,)


def test_only_llama_query_and_key_rows_are_interleaved():
    rows = {
        part: LLAMA.slots(f"blk.0.{part}", FACTS)[0].rows
        for part in ("attn_q.weight", "attn_k.bias", "attn_v.weight", "attn_output.weight")
    }
    assert rows == {
        "attn_q.weight": Interleaved(8),
        "attn_k.bias": Interleaved(2),
        "attn_v.weight": None,
        "attn_output.weight": None,
    }
    for arch in ("qwen3", "gemma3"):
        slots = ARCHITECTURES[arch].slots("blk.0.attn_q.weight", facts_of(arch))
        assert slots[0].rows is None


def test_gemma_norms_lose_their_offset():
    gemma, facts = ARCHITECTURES["gemma3"], facts_of("gemma3")
    parts = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm")
    for name in (*(f"blk.3.{part}.weight" for part in parts), "output_norm.weight"):
        assert gemma.slots(name, facts)[0].change is Change.MINUS_ONE
    assert gemma.slots("blk.3.ffn_up.weight", facts)[0].change is Change.NONE


def test_blocks_behind_the_models_layers_are_dropped():
    facts = facts_of("qwen35", nextn_predict_layers=1, ssm__group_count=1, ssm__time_step_rank=1)
    assert ARCHITECTURES["qwen35"].slots("blk.19.nextn.eh_proj.weight", facts) == ()
    with pytest.raises(ConvertError, match="has no tensor"):
        ARCHITECTURES["qwen35"].slots("blk.18.nextn.eh_proj.weight", facts)


@pytest.mark.parametrize("name", ["blk.0.sinks.weight", "blk.x.attn_q.weight", "what", "a.b.c"])
def test_unknown_tensors_are_refused_by_name(name):
    with pytest.raises(ConvertError, match=f'"llama" has no tensor "{name}"'):
        LLAMA.slots(name, FACTS)


def test_unknown_architectures_are_refused_by_name():
    with pytest.raises(ConvertError, match='architecture "rwkv9".*"gemma3".*--raw-names'):
        architecture_of(Metadata({"general.architecture": "rwkv9"}))
    with pytest.raises(ConvertError, match='"general.architecture", which is missing'):
        architecture_of(Metadata({}))
