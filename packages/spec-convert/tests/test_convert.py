import json
import shutil
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load, load_model
from safetensors.numpy import load_file

from spec_convert import ConvertError, convert, verify

from .conftest import HIDDEN, interleave, llama_gguf_name, llama_weights

pytestmark = pytest.mark.usefixtures("each_way")
Kind = gguf.GGMLQuantizationType
IDS = [1, 5, 9, 200, 260, 3, 3, 77]


def logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([IDS])).astype(mx.float32))


def test_float_tensors_come_back_exactly(make_llama, tiny_weights, tmp_path):
    report = convert(make_llama(), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == tiny_weights.keys()
    for name, wanted in tiny_weights.items():
        assert np.array_equal(loaded[name], wanted), name
    assert report.lossless and report.bytes_before == report.bytes_after


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_a_quantised_model_computes_what_its_dequantised_twin_computes(make_llama, tmp_path, kind):
    source = make_llama(kind)
    packed = convert(source, tmp_path / "packed")
    plain = convert(source, tmp_path / "plain", dtype="f32")
    assert packed.lossless and plain.lossless
    assert packed.bytes_after < plain.bytes_after / 2.5
    np.testing.assert_allclose(
        logits(tmp_path / "packed"), logits(tmp_path / "plain"), rtol=0, atol=1e-5
    )


def test_the_output_loads_with_its_tokenizer(make_llama, tmp_path):
    convert(make_llama(Kind.Q4_1), tmp_path / "out")
    model, tokenizer = load(str(tmp_path / "out"))
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, tokenizer.vocab["hello"]]
    assert tokenizer.eos_token_ids == {tokenizer.vocab["<|end|>"]}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "<|start|>hello"
    assert model.layers[0].self_attn.q_proj.bits == 4


def test_other_types_are_rounded_and_reported(make_gguf, tiny_metadata, make_llama, tmp_path):
    report = convert(make_llama(Kind.Q8_0), tmp_path / "out", dtype="bf16")
    worst = max(tensor.max_error for tensor in report.tensors)
    assert not report.lossless and 0 < worst < 0.01
    assert all(result.within for result in verify(tmp_path / "out", make_llama(Kind.Q8_0)))


def test_an_unused_output_tensor_of_a_tied_model_is_dropped_whatever_its_type(
    make_gguf, tiny_metadata, make_llama, tmp_path
):
    tied = convert(make_llama(), tmp_path / "tied")
    assert tied.dropped == ()
    weights, n_vocab = llama_weights(), len(tiny_metadata["tokenizer.ggml.tokens"])
    tensors = {
        llama_gguf_name(name): (
            interleave(value, 4 if "q_proj" in name else 2)
            if "q_proj" in name or "k_proj" in name
            else value,
            Kind.F32,
        )
        for name, value in weights.items()
    }
    block, n_bytes = gguf.GGML_QUANT_SIZES[Kind.Q8_1]  # nothing here can read this type
    row = HIDDEN // block * n_bytes
    tensors["output.weight"] = (np.zeros((n_vocab, row), np.uint8), Kind.Q8_1)
    metadata = {k: v for k, v in tiny_metadata.items() if k != "general.architecture"}
    said = make_gguf("said.gguf", "llama", tensors, metadata | {"llama.tie_word_embeddings": True})
    report = convert(said, tmp_path / "said")
    assert report.dropped == ("output.weight",) and report.lossless
    assert load_file(tmp_path / "said" / "model.safetensors").keys() == weights.keys()
    np.testing.assert_array_equal(logits(tmp_path / "said"), logits(tmp_path / "tied"))
    assert all(result.within for result in verify(tmp_path / "said", said))
    unsaid = make_gguf("unsaid.gguf", "llama", tensors, metadata)
    with pytest.raises(ConvertError, match="type Q8_1 has no dequantiser"):
        convert(unsaid, tmp_path / "unsaid")


def test_raw_names_keep_everything_as_it_was(make_gguf, tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    source = make_gguf("x.gguf", "rwkv9", {"some.weight": (values, Kind.Q8_0)}, {})
    with pytest.raises(ConvertError, match='No rules for architecture "rwkv9"'):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", raw_names=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert report.architecture == "rwkv9" and report.lossless
    assert [result.max_error for result in verify(tmp_path / "out", source)] == [0.0]


def test_names_in_a_file_never_become_paths(make_gguf, make_llama, tmp_path):
    values = np.zeros((2, 32), np.float32)
    tensors = {name: (values, Kind.F32) for name in ("../escape.weight", "/etc/escape.weight")}
    names = {"general.name": "../../escape", "tokenizer.chat_templates": ["../escape"]}
    convert(make_gguf("x.gguf", "any", tensors, names), tmp_path / "a" / "raw", raw_names=True)
    template = {"tokenizer.chat_template.../escape": "text"}
    convert(make_llama(**names, **template), tmp_path / "a" / "llama")
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == [
        "config.json",
        "generation_config.json",
        "llama",
        "model.safetensors",
        "model.safetensors",
        "raw",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not [path for path in tmp_path.rglob("*escape*")]


def test_progress_counts_up_to_the_whole(make_llama, tmp_path):
    calls: list[tuple[int, int, str]] = []
    report = convert(make_llama(), tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1] == report.bytes_before


def test_scales_beyond_float16_are_kept_in_float32(make_gguf, tmp_path):
    values = np.full((2, 64), -480_000.0, np.float32)
    values[:, 0] = 420_000.0
    source = make_gguf("x.gguf", "any", {"w.weight": (values, Kind.Q4_0)}, {})
    report = convert(source, tmp_path / "out", raw_names=True)
    assert report.tensors[0].layout == "affine 4-bit, group 32, F32 scales"
    assert verify(tmp_path / "out", source)[0].max_error == 0


def test_exact_only_refuses_what_would_be_rounded(make_llama, tmp_path):
    convert(make_llama(Kind.Q4_1), tmp_path / "exact", exact_only=True)
    with pytest.raises(ConvertError, match='exact-only.*"token_embd.weight" of type Q8_0'):
        convert(make_llama(Kind.Q8_0), tmp_path / "out", exact_only=True, dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_large_outputs_are_sharded_with_an_index(make_llama, tiny_weights, tmp_path):
    convert(make_llama(), tmp_path / "out", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    for name, wanted in tiny_weights.items():
        stored = load_file(tmp_path / "out" / index["weight_map"][name])
        assert np.array_equal(stored[name], wanted)
    assert all(result.max_error == 0 for result in verify(tmp_path / "out", make_llama()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.block_count": 3}, "must hold 3 layers, got tensors of 2"),
        ({"llama.attention.head_count_kv": 5}, "twice the 5 heads"),
        ({"llama.attention.head_count": None}, "which is missing"),
        ({"tokenizer.ggml.pre": "new"}, 'pre-tokeniser "new"'),
    ],
)
def test_a_refused_file_leaves_no_output(make_llama, tmp_path, changes, words):
    source = make_llama(**changes)
    with pytest.raises(ConvertError, match=words):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_a_missing_tensor_is_refused_by_name(make_gguf, make_llama, tiny_metadata, tmp_path):
    reader = gguf.GGUFReader(make_llama())
    tensors = {
        tensor.name: (np.array(tensor.data), Kind.F32)
        for tensor in reader.tensors
        if tensor.name != "blk.1.attn_v.weight"
    }
    values = {k: v for k, v in tiny_metadata.items() if k != "general.architecture"}
    source = make_gguf("less.gguf", "llama", tensors, values)
    with pytest.raises(ConvertError, match='"blk.1.attn_v.weight", which is missing'):
        convert(source, tmp_path / "out")


def test_a_failure_in_the_middle_leaves_no_output(make_llama, tmp_path):
    source = make_llama()

    def stop(done: int, total: int, name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_a_file_that_shrinks_while_it_is_read_is_reported(make_llama, tmp_path):
    source = make_llama()

    def cut(done: int, total: int, name: str) -> None:
        with source.open("r+b") as file:
            file.truncate(source.stat().st_size - 20_000)

    with pytest.raises(ConvertError, match="became shorter while it was read"):
        convert(source, tmp_path / "out", progress=cut)
    assert not (tmp_path / "out").exists()


def test_a_missing_source_and_a_wrong_dtype_are_named(make_llama, tmp_path):
    with pytest.raises(ConvertError, match="nowhere.gguf.*No such file"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "out")
    with pytest.raises(ConvertError, match='must be one of "f32", "f16", "bf16", got "int4"'):
        convert(make_llama(), tmp_path / "out", dtype="int4")


def test_a_disk_without_room_is_refused_before_writing(make_llama, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConvertError, match="bytes free, got 1000"):
        convert(make_llama(), tmp_path / "out")
