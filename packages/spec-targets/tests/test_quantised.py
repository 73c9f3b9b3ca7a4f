import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from spec_core import LoadError
from spec_targets.tiny import VOCAB

WIDE = {"head_dim": 32}
PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(300)]


def prefilled(target, chunk=300):
    cache = target.make_cache()
    for start in range(0, len(PROMPT), chunk):
        output = target.prefill(PROMPT[start : start + chunk], cache)
    return cache, output.logits


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "gemma3_text"])
def test_packed_keys_take_the_bytes_they_promise(make_target, model_type):
    plain, _ = prefilled(make_target(model_type, **WIDE))
    grows = [i for i, e in enumerate(plain.entries) if type(e).__name__ == "KVCache"]
    assert grows
    # float32 rows against packed bits plus a float32 scale and bias per 32 channels.
    for bits, share in ((8, (8 + 2) / 32), (4, (4 + 2) / 32)):
        packed, _ = prefilled(make_target(model_type, kv_bits=bits, **WIDE))
        for i in grows:
            assert packed.entries[i].nbytes == share * plain.entries[i].nbytes


def test_eight_bits_attend_to_the_whole_prompt_across_chunk_edges(make_target):
    want = prefilled(make_target("qwen3", **WIDE))[1]
    target = make_target("qwen3", kv_bits=8, **WIDE)
    for chunk in (300, 64, 37):
        logits = prefilled(target, chunk)[1]
        assert mx.abs(logits - want).max().item() < 0.05 * mx.abs(want).max().item()
        assert mx.argmax(logits).item() == mx.argmax(want).item()


def test_every_growing_layer_is_packed_from_the_first_token(make_target):
    target = make_target("nanbeige", kv_bits=4, **WIDE)
    entries = target.make_cache().entries
    assert [type(entry) for entry in entries] == [QuantizedKVCache] * 6


def test_packed_attention_is_part_of_the_exactness_probe(make_target):
    assert make_target("qwen3", kv_bits=8, **WIDE).exact_refusal is None


def test_other_widths_are_refused(make_target):
    with pytest.raises(ValueError, match=r"kv_bits must be one of \(4, 8\), got 3"):
        make_target("qwen3", kv_bits=3)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gpt_oss", WIDE, 'attention of family "gpt_oss" cannot read packed keys'),
        (
            "deepseek_v3",
            {"kv_lora_rank": 32, "qk_rope_head_dim": 32},
            'attention of family "deepseek_v3" cannot read packed keys',
        ),
        ("mamba2", {}, 'Family "mamba2" keeps no keys that grow'),
        ("qwen3", {}, r"multiple of 32 channels wide, got \[8\]"),
    ],
)
def test_models_whose_keys_cannot_be_packed_are_refused(make_target, model_type, fields, reason):
    with pytest.raises(LoadError, match=reason):
        make_target(model_type, kv_bits=8, **fields)
