from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.generate import generate_step

from spec_core import LoadError, Pair, generate
from spec_core.testing import ScriptedDrafter, check_target
from spec_targets.families import FAMILIES
from spec_targets.load import family_for
from spec_targets.refuse import UNTESTED
from spec_targets.tiny import VOCAB

PROMPT = [3, 14, 15, 9, 26, 5, 35]
# One of each shape: plain, windowed, softcapped, scaled embedding, experts, sinks, looped, chunked,
# shared keys, text inside a multimodal model. The rest runs with the slow tests.
QUICK = (
    "cohere2",
    "deepseek_v3",
    "deepseek_v41",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "gpt_oss",
    "granitemoe",
    "lfm2_moe",
    "llama",
    "llama4",
    "mamba2",
    "mixtral",
    "nanbeige",
    "nemotron_h",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
)
# Their prompt chunks round in another way than their single rows, and check_target builds its
# reference by prefill. Blocks against single rows are compared bit for bit in test_rollback and
# test_compressed.
ROUNDING = dict.fromkeys(
    "bailing_moe_v3 deepseek_v3 deepseek_v41 falcon_h1 glm4_moe_lite granitemoehybrid kimi_k25 "
    "kimi_linear kimi_vl longcat_flash mamba2 nemotron_h plamo2".split(),
    1e-3,
)
NOT_TAPPED = {"gemma3n": "the output of layer 3 does not lead to the model's own hidden states"}


def ids_of(rounds):
    return [token for round_ in rounds for token in round_.tokens]


def taps_of(target):
    return (0, target.n_layers - 1) if target.tap_refusal is None else ()


def check(target, model_type, n_rounds):
    atol = ROUNDING.get(model_type, 0.0) * max(1, n_rounds // 24)  # adds up with the positions
    taps = taps_of(target)
    check_target(target, prompt=PROMPT, taps=taps, n_rounds=n_rounds, max_block=7, atol=atol)


@pytest.mark.parametrize("model_type", QUICK)
def test_a_family_keeps_the_contract(make_target, model_type):
    # Seven prompt ids and 12 rounds of random blocks: well beyond the windows of 12.
    target = make_target(model_type)
    assert target.tap_refusal == NOT_TAPPED.get(model_type)
    check(target, model_type, n_rounds=12)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_keeps_the_contract_for_two_hundred_rounds(make_target, model_type):
    # About 600 committed positions: across the borders of cache buffers and of prompt chunks.
    target = make_target(model_type)
    assert target.tap_refusal == NOT_TAPPED.get(model_type)
    check(target, model_type, n_rounds=200)


@pytest.mark.parametrize("model_type", QUICK)
def test_plain_decoding_equals_mlx_lm_and_drafts_do_not_change_it(
    make_target, make_model, model_type
):
    steps = generate_step(mx.array(PROMPT), make_model(model_type), max_tokens=40)
    want = [token for token, _ in steps][:40]
    target = make_target(model_type)
    assert ids_of(generate(Pair(target), PROMPT, max_tokens=40)) == want
    assert len(set(want)) > 3  # a model that repeats one token would prove nothing
    drafter = ScriptedDrafter(want, len(PROMPT), VOCAB, wrong_at=(2, 5), taps=taps_of(target))
    assert ids_of(generate(Pair(target, drafter), PROMPT, max_tokens=40)) == want


@pytest.mark.parametrize(
    "model_type", ["gemma", "gemma2", "gemma3_text", "gemma4_text", "granite", "minicpm", "cohere2"]
)
def test_prefill_of_scaled_families_equals_the_models_own_forward(
    make_target, make_model, model_type
):
    # Against a model that nothing of ours has touched: a missing scale would agree with itself.
    want = make_model(model_type)(mx.array([PROMPT * 4]))[0, -1:]
    target = make_target(model_type)
    logits = target.prefill(PROMPT * 4, target.make_cache()).logits
    assert mx.allclose(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skips_norm", [False, True])
def test_a_looped_model_counts_layers_as_the_stream_passes_them(
    make_target, make_model, skips_norm
):
    fields = {"skip_loop_final_norm": skips_norm}
    target, model = make_target("nanbeige", **fields), make_model("nanbeige", **fields).model
    assert target.n_layers == 6  # 3 layers, run twice
    output = target.prefill(PROMPT, target.make_cache(), taps=(1, 2, 3, 5))

    hidden, want = model.embed_tokens(mx.array([PROMPT])), []
    for _ in range(2):
        for layer in model.layers:
            hidden = layer(hidden, "causal", None)
            want.append(hidden)
        hidden = hidden if skips_norm else model.norm(hidden)
    # The tap on the boundary is what enters the second loop.
    want[2] = want[2] if skips_norm else model.norm(want[2])
    for tap, layer_id in zip(output.taps, (1, 2, 3, 5), strict=True):
        assert mx.allclose(tap, want[layer_id][0], atol=1e-5)


def test_layers_that_share_keys_with_an_earlier_one_keep_the_contract(make_target):
    fields = {"num_hidden_layers": 6, "num_kv_shared_layers": 3}
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    target = make_target("gemma4_text", layer_types=types, **fields)
    assert len(target.make_cache().entries) == 3
    check_target(target, prompt=PROMPT, taps=(1, 5), n_rounds=12, max_block=7)


def test_remapped_model_types_find_their_family():
    assert family_for("mistral") is FAMILIES["llama"]
    assert family_for("gemma4_unified") is FAMILIES["gemma4"]


def test_an_unknown_model_type_is_refused_with_what_is_known():
    with pytest.raises(LoadError, match=r'No target family "qwen33".*"qwen3"\?') as refusal:
        family_for("qwen33")
    assert "gemma4_text" in str(refusal.value) and "qwen3_moe" in str(refusal.value)


def test_a_family_that_cannot_be_a_target_is_refused_with_the_reason():
    with pytest.raises(LoadError, match=r'"gpt_neox" is in mlx-lm .*: its head is part of the'):
        family_for("gpt_neox")


def test_every_model_of_mlx_lm_is_a_target_or_refused_with_a_reason():
    modules = Path(mlx_lm.models.__path__[0]).glob("*.py")
    models = {file.stem for file in modules if "\nclass Model(" in file.read_text("utf-8")}
    assert len(models) > 100
    assert models <= FAMILIES.keys() | UNTESTED.keys()
    assert not FAMILIES.keys() & UNTESTED.keys()


def test_a_family_that_only_another_library_has_is_refused_with_its_name():
    with pytest.raises(LoadError, match=r'"deepseek_v4" is not in mlx-lm .*; mlx-vlm 0\.7\.10'):
        family_for("deepseek_v4")


def test_a_family_that_the_installed_mlx_lm_lacks_is_refused_with_the_version(monkeypatch):
    monkeypatch.setitem(FAMILIES, "from_the_future", FAMILIES["llama"])
    with pytest.raises(LoadError, match=r'"from_the_future" needs mlx-lm 0\.32\.2 or newer, got'):
        family_for("from_the_future")
