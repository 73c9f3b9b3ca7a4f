import pytest

from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata
from spec_convert.names import ARCHITECTURES, Slot, architecture_of

HEADS = Metadata({"llama.attention.head_count": 8, "llama.attention.head_count_kv": 2})


def test_llama_tensors_get_their_hugging_face_names():
    llama = ARCHITECTURES["llama"]
    assert llama.slot("token_embd.weight", HEADS) == Slot(
        "model.embed_tokens.weight", embedding=True
    )
    assert llama.slot("output.weight", HEADS) == Slot("lm_head.weight")
    assert llama.slot("blk.11.ffn_down.weight", HEADS) == Slot(
        "model.layers.11.mlp.down_proj.weight"
    )
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert llama.slot("blk.0.ffn_norm.weight", HEADS) == Slot(norm)


def test_only_llama_query_and_key_rows_are_interleaved():
    llama = ARCHITECTURES["llama"]
    heads = {
        part: slot.interleaved_heads
        for part in ("attn_q", "attn_k", "attn_v", "attn_output")
        if (slot := llama.slot(f"blk.0.{part}.weight", HEADS))
    }
    assert heads == {"attn_q": 8, "attn_k": 2, "attn_v": 0, "attn_output": 0}
    gemma = ARCHITECTURES["gemma3"].slot("blk.0.attn_q.weight", HEADS)
    assert gemma is not None and gemma.interleaved_heads == 0


def test_gemma_norms_lose_their_offset():
    gemma = ARCHITECTURES["gemma3"]
    parts = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm")
    for name in (*(f"blk.3.{part}.weight" for part in parts), "output_norm.weight"):
        slot = gemma.slot(name, HEADS)
        assert slot is not None and slot.shift == -1.0
    plain = gemma.slot("blk.3.ffn_up.weight", HEADS)
    assert plain is not None and plain.shift == 0.0


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", "blk.x.attn_q.weight", "what", "a.b.c"]
)
def test_unknown_tensors_are_refused_by_name(name):
    with pytest.raises(ConvertError, match=f'"llama" has no tensor "{name}"'):
        ARCHITECTURES["llama"].slot(name, HEADS)


def test_unknown_architectures_are_refused_by_name():
    with pytest.raises(ConvertError, match='architecture "rwkv9".*"gemma3".*--raw-names'):
        architecture_of(Metadata({"general.architecture": "rwkv9"}))
    with pytest.raises(ConvertError, match='"general.architecture", which is missing'):
        architecture_of(Metadata({}))
