import gc
import json

import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_core import LoadError, room
from spec_targets import acceleration, load_target
from spec_targets.load import _compute_type
from spec_targets.tiny import build, tiny_config


def test_a_checkpoint_loads_with_its_limits(checkpoint):
    target, _ = load_target(checkpoint())
    assert (target.model_type, target.context_length, target.vocab_size) == ("qwen3", 512, 61)
    assert target.exact_refusal is None and target.tap_refusal is None


def test_the_compute_type_can_be_chosen(checkpoint):
    target, _ = load_target(checkpoint(), dtype=mx.bfloat16)
    assert target.embed(mx.array([1])).dtype == mx.bfloat16


def test_a_gpu_computes_a_packed_checkpoint_in_16_bits_though_it_holds_some_float32():
    """As a converted GGUF does: its norms are float32, and so would be every product."""
    model = build(tiny_config("qwen3"))
    assert _compute_type(model, on_cpu=False) is None  # nothing packed: its own type
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )
    assert _compute_type(model, on_cpu=False) == mx.bfloat16
    assert _compute_type(model, on_cpu=True) == mx.float32
    model.set_dtype(mx.float16)
    assert _compute_type(model, on_cpu=False) is None


def test_a_model_larger_than_the_machine_is_refused_before_it_is_read(checkpoint, monkeypatch):
    folder = checkpoint()
    gc.collect()
    held = mx.get_active_memory()
    monkeypatch.setattr(room, "machine_bytes", lambda: mx.get_active_memory() + 1000)
    n_bytes = sum(array.nbytes for array in mx.load(str(folder / "model.safetensors")).values())
    with pytest.raises(LoadError, match=rf'^\[load\] The model in ".*" needs {n_bytes} bytes of'):
        load_target(folder)
    assert mx.get_active_memory() - held < 1000  # nothing of it was read


def test_packed_keys_are_an_argument_of_loading(checkpoint):
    target, _ = load_target(checkpoint(head_dim=32), kv_bits=8)
    assert target.kv_bits == 8
    with pytest.raises(LoadError, match="multiple of 32 channels"):
        load_target(checkpoint(), kv_bits=8)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(LoadError, match='No folder ".*nowhere"'):
        load_target(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"must hold a config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="must be JSON"):
        load_target(tmp_path)
    for content, shown in (("{}", "none"), ("[]", "[]"), ('{"model_type": 3}', "3")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(LoadError, match='names a "model_type", got ') as refused:
            load_target(tmp_path)
        assert f"got {shown}. Give the folder of a checkpoint" in str(refused.value)


def test_missing_weights_are_refused_with_the_file(checkpoint):
    folder = checkpoint(weights=False)
    with pytest.raises(LoadError, match=r"must hold model\*\.safetensors"):
        load_target(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(LoadError, match=r'lacks 1 of 1 weight files.*"model-1\.safetensors"'):
        load_target(folder)
    index.write_text("[]")
    with pytest.raises(LoadError, match='must hold a "weight_map"'):
        load_target(folder)


def test_something_else_under_the_name_of_weights_is_described(checkpoint):
    folder = checkpoint()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, said in (
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "a Git LFS pointer"),
        (b"<html>404</html>", "an HTML page"),
        (b"", "an empty or zeroed file"),
        (whole[: len(whole) // 2], "bytes of data where"),
    ):
        weights.write_bytes(content)
        with pytest.raises(LoadError, match=said):
            load_target(folder)


@pytest.mark.parametrize("key", ["model_file", "auto_map"])
def test_python_of_the_checkpoint_is_refused_unless_trusted(checkpoint, key):
    folder = checkpoint(extra={key: "modeling.py"})
    with pytest.raises(LoadError, match=f'"config.json".*{key}.*--trust-remote-code'):
        load_target(folder)


def test_python_named_deeper_in_a_config_is_refused_too_and_never_run(checkpoint, tmp_path):
    nested = {"text_config": {"vision": {"auto_map": {"AutoModel": "modeling.Own"}}}}
    folder = checkpoint(extra=nested)
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(LoadError, match=r'"text_config\.vision\.auto_map"'):
        load_target(folder)
    plain = checkpoint()
    (plain / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    processor = {"auto_map": {"AutoProcessor": "modeling.Own"}}
    for name in ("processor_config.json", "preprocessor_config.json"):
        (plain / name).write_text(json.dumps(processor))
    load_target(plain)  # text alone: processors are not read
    assert not (tmp_path / "ran").exists()


def test_python_of_the_tokenizer_is_refused_unless_trusted(checkpoint):
    folder = checkpoint()
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {}}))
    with pytest.raises(LoadError, match='"tokenizer_config.json".*auto_map'):
        load_target(folder)
    assert load_target(folder, trust_remote_code=True)[0].model_type == "qwen3"


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"group_size": 64, "bits": 7}, '7-bit "affine" weights in groups of 64 need kernels'),
        ({"group_size": 64, "bits": 4, "mode": "odd"}, '4-bit "odd" weights'),
        ({"group_size": 64, "bits": 4, "lm_head": {"bits": 9}}, '9-bit "affine" weights'),
        (["four"], '"quantization" must be a table'),
    ],
)
def test_packed_weights_without_kernels_are_refused(checkpoint, quantization, reason):
    with pytest.raises(LoadError, match=reason):
        load_target(checkpoint(extra={"quantization": quantization}))


def test_one_bit_packs_are_refused_where_mlx_cannot_multiply_them(checkpoint, monkeypatch):
    def no_kernel(*_, **settings):
        raise ValueError(f"The requested number of bits {settings['bits']} is not supported.")

    monkeypatch.setattr(mx, "quantized_matmul", no_kernel)
    with pytest.raises(LoadError, match='1-bit "affine" weights in groups of 128 need kernels'):
        load_target(checkpoint(extra={"quantization": {"group_size": 128, "bits": 1}}))


@pytest.mark.skipif(mx.metal.is_available(), reason="bitnet runs on Metal")
def test_bitnet_without_metal_is_refused(checkpoint):
    folder = checkpoint(extra={"quantization_config": {"quant_method": "bitnet"}})
    with pytest.raises(LoadError, match="needs a Metal device"):
        load_target(folder)


def test_weights_that_do_not_fit_are_refused_with_what_mlx_lm_says(checkpoint):
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(LoadError, match="mlx-lm must be able to load"):
        load_target(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "must be able to load"),
        ({"hidden_size": "16"}, "must be able to load"),
        ({"rope_theta": "fast"}, "must be able to load"),
        ({"rope_scaling": [1]}, "must be able to load"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "must be able to load"),
        ({"text_config": [1]}, '"text_config" must be a table'),
        ({"num_attention_heads": 0}, '"num_attention_heads".*above 0, got 0'),
        ({"max_position_embeddings": "256"}, "above 0, got '256'"),
        ({"max_position_embeddings": -1}, "above 0, got -1"),
        ({"max_position_embeddings": True}, "above 0, got True"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused_whatever_they_break(checkpoint, fields, message):
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(LoadError, match=message) as error:
        load_target(folder)
    assert len(str(error.value).splitlines()) == 1


def test_json_too_deep_to_read_is_refused(checkpoint):
    folder = checkpoint()
    for name in ("model.safetensors.index.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(LoadError, match=name):
            load_target(folder)


def test_a_generation_config_that_is_no_table_is_refused(checkpoint):
    folder = checkpoint()
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(LoadError, match="must be able to load"):
        load_target(folder)


def test_a_path_that_mlx_lm_takes_for_a_pattern_is_refused(checkpoint):
    folder = checkpoint()
    odd = folder / "[x]"
    odd.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(odd / name)
    with pytest.raises(LoadError, match="Rename the folder"):
        load_target(odd)


def test_bits_that_no_cache_has_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="3"):
        load_target(tmp_path / "nowhere", kv_bits=3)


def test_another_checkpoint_opens_beside_a_target_with_its_wishes_about_kernels(
    checkpoint, tmp_path, monkeypatch
):
    seen = []
    install = acceleration.install_kernels

    def noted(target, config, *, mode, exact, verdicts):
        seen.append((mode, exact, verdicts))
        return install(target, config, mode=mode, exact=exact, verdicts=verdicts)

    monkeypatch.setattr("spec_targets.load.install_kernels", noted)
    target, _ = load_target(checkpoint(), kernels="off", verdicts=tmp_path / "kernels.json")
    target.open_beside(checkpoint())
    assert seen == [("off", False, tmp_path / "kernels.json")] * 2
