"""What is read of a full checkpoint for its draft stages, and what is refused, by name."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError, room
from spec_drafters import DeepseekV4Drafter, LookupDrafter, load_drafter
from spec_drafters import _files as files_module
from spec_drafters import _shards as shards_module
from spec_drafters._blockscale import refuse_without_kernels
from spec_drafters._checkpoint import open_checkpoint
from spec_drafters._shards import Shards
from spec_drafters.deepseek_v4 import bytes_needed
from spec_drafters.quantise import quantise_checkpoint

from .checkpoints import TinyTarget
from .deepseek_layouts import (
    DRAFT_EXPERTS,
    HIDDEN,
    INNER,
    N_STAGES,
    Raw,
    bundle,
    write_bundle,
    write_file,
)

INDEX = "model.safetensors.index.json"


def load(folder: Path, **options: Any) -> Any:
    return load_drafter(folder, TinyTarget(), mode="dspark", **options)


def refusal(folder: Path, target: Any = None) -> str:
    with pytest.raises(LoadError) as caught:
        load_drafter(folder, target or TinyTarget(), mode="dspark")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("[")
    return message


def bytes_read() -> int:
    """What this process has read from files so far."""
    status = Path("/proc/self/io")
    if not status.is_file():
        pytest.skip("only Linux counts the bytes that a process reads")
    return int(status.read_text().split("rchar: ")[1].split()[0])


def shards_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files that hold draft stages, and the others."""
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    ours = {file for name, file in listed.items() if name.startswith("mtp.")}
    all_files = sorted(folder.glob("*.safetensors"))
    return [f for f in all_files if f.name in ours], [f for f in all_files if f.name not in ours]


def write_sparse(path: Path, name: str, n_bytes: int) -> None:
    """A shard as large as a real one, whose data takes no room on the disk."""
    entry = {"dtype": "I8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}
    header = json.dumps({name: entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + n_bytes)


@pytest.mark.parametrize("bits", [4, 16])
def test_of_fifty_shards_only_those_with_draft_stages_are_read(bits: int, tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle(), n_shards=50, n_draft_shards=3)
    ours, others = shards_of(tmp_path)
    assert (len(ours), len(others)) == (3, 47)
    for path in others:
        write_sparse(path, "layers.0.ballast", 2**24)
    size = sum(path.stat().st_size for path in ours)
    index = (tmp_path / INDEX).stat().st_size
    load(tmp_path, bits=bits)  # whatever Python reads at a first call
    before = bytes_read()
    drafter = load(tmp_path, bits=bits)
    read = bytes_read() - before
    headers = 9 * N_STAGES * len(ours) * 2**17  # each stack of experts opens its files once more
    assert size - 2**17 < read < 2 * size + headers + 3 * index
    assert read < sum(path.stat().st_size for path in others) / 20
    assert drafter.report.nbytes > 0


def test_shards_without_draft_stages_need_not_be_there(tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle(), n_shards=50, n_draft_shards=3)
    for path in shards_of(tmp_path)[1]:
        path.unlink()
    assert load(tmp_path).max_draft == 5


def test_draft_stages_are_found_in_one_file_without_an_index_too(tmp_path: Path) -> None:
    b = bundle("v4.1")
    write_bundle(tmp_path, b)
    for path in [tmp_path / INDEX, *tmp_path.glob("*.safetensors")]:
        path.unlink()
    write_file(tmp_path / "model.safetensors", b.stored)
    assert load(tmp_path).taps == (2, 3, 4)


def test_pieces_of_a_stack_are_given_up_once_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path, bundle())
    released: list[int] = []
    original = Shards.release
    monkeypatch.setattr(Shards, "release", lambda self: (released.append(1), original(self))[1])
    load(tmp_path)
    assert len(released) == 3 * N_STAGES


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_what_the_headers_promise_is_what_is_held(bits: int, tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle())
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint.tensors, Shards)
    promised = bytes_needed(checkpoint.tensors.stored, bits, mx.float32)
    held = load(tmp_path, bits=bits).report.nbytes
    # Small tables cannot be grouped here; in a real checkpoint they are a hundredth of the whole.
    assert 0.7 * held < promised < 1.02 * held


def test_too_large_a_checkpoint_is_refused_with_its_bytes_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path, bundle())
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint.tensors, Shards)
    target = TinyTarget()
    mx.eval(target.table)
    needed = bytes_needed(checkpoint.tensors.stored, 4, mx.float32)
    monkeypatch.setattr(room, "machine_bytes", lambda: mx.get_active_memory() + needed - 1)
    monkeypatch.setattr(shards_module, "_load", lambda path: pytest.fail("data was read"))
    message = refusal(tmp_path, target)
    assert message.startswith(f"[dspark] The draft stack needs {needed} bytes of memory")


def test_a_checkpoint_larger_than_this_very_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file whose header says what no test machine has."""
    listed = write_bundle(tmp_path, bundle())
    write_sparse(tmp_path / "huge.safetensors", "mtp.0.huge", 2**40)
    listed["mtp.0.huge"] = "huge.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    monkeypatch.setattr(shards_module, "_load", lambda path: pytest.fail("data was read"))
    message = refusal(tmp_path)
    assert "needs 4398" in message and "got " in message  # as float32, in the type it computes in


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle(), n_shards=6, n_draft_shards=3)
    gone = shards_of(tmp_path)[0][1]
    gone.unlink()
    message = refusal(tmp_path)
    assert f"names 3 shards, got 2; missing: {gone.name}. Download them." in message


def test_a_cut_shard_and_one_with_a_broken_header_are_named(tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle())
    path = shards_of(tmp_path)[0][0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert re.search(
        rf'"{path.name}" must be a whole safetensors .* bytes of data where "mtp', refusal(tmp_path)
    )
    path.write_bytes(whole[:8] + b'{"a": [1, 2' + whole[19:])
    assert f'"{path.name}" must be a whole safetensors file, got a header that cannot' in refusal(
        tmp_path
    )
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1")
    assert "look like a Git LFS pointer" in refusal(tmp_path)


def test_an_index_that_places_a_tensor_wrongly_is_named(tmp_path: Path) -> None:
    listed = write_bundle(tmp_path, bundle())
    listed["mtp.2.extra.weight"] = shards_of(tmp_path)[0][0].name
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert f'places "mtp.2.extra.weight" in "{listed["mtp.2.extra.weight"]}", which lacks it' in (
        refusal(tmp_path)
    )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": [1, 2]}))
    assert 'must hold a "weight_map"' in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        "mtp.0.attn_norm.weight",
        "mtp.0.attn.attn_sink",
        "mtp.0.attn.wo_a.weight",
        "mtp.0.attn.kv_norm.weight",
        "mtp.0.attn.q_norm.weight",
        "mtp.0.ffn.gate.weight",
        "mtp.0.ffn.shared_experts.w1.weight",
        "mtp.0.hc_attn_base",
        "mtp.1.attn.wq_a.weight",
        "mtp.1.ffn.gate.bias",
        "mtp.1.ffn.experts.3.w2.weight",
        "mtp.1.ffn.experts.3.w2.scale",
        "mtp.1.hc_ffn_scale",
        "mtp.2.norm.weight",
        "mtp.2.hc_head_fn",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.markov_head.markov_w2.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    b = bundle()
    del b.stored[name]
    write_bundle(tmp_path, b)
    assert f'"{name}"' in refusal(tmp_path)


def test_missing_stages_are_counted(tmp_path: Path) -> None:
    b = bundle()
    b.stored = {name: raw for name, raw in b.stored.items() if not name.startswith("mtp.1.")}
    write_bundle(tmp_path, b)
    assert "numbered from 0 without a gap, got [0, 2]" in refusal(tmp_path)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    b = bundle()
    b.stored["mtp.1.attn.gate_proj.weight"] = Raw("BF16", (2, 2), bytes(8))
    write_bundle(tmp_path, b)
    assert '"mtp.1.attn.gate_proj.weight" without one' in refusal(tmp_path)


def resized(name: str, kind: str, shape: tuple[int, ...]) -> tuple[str, Raw]:
    n_bytes = {"BF16": 2, "F32": 4}.get(kind, 1)
    return name, Raw(kind, shape, bytes(int(np.prod(shape)) * n_bytes))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            resized("mtp.1.attn.wq_b.weight", "F8_E4M3", (320, 32)),
            '"mtp.1.attn.wq_b.weight" must have shape (384, 32) in FP8',
        ),
        (
            resized("mtp.1.ffn.experts.2.w1.weight", "I8", (INNER, HIDDEN // 4)),
            '"mtp.1.ffn.experts.2.w1.weight" must have shape (32, 32) in FP8 or (32, 16) in FP4',
        ),
        (
            resized("mtp.1.hc_attn_fn", "F32", (24, 64)),
            '"mtp.1.hc_attn_fn" must have shape (24, 128)',
        ),
        (
            resized("mtp.0.main_norm.weight", "BF16", (16,)),
            '"mtp.0.main_norm.weight" must have shape (32,)',
        ),
        (
            resized("mtp.2.markov_head.markov_w1.weight", "BF16", (39, 8)),
            '"mtp.2.markov_head.markov_w1.weight" must have shape (40, 8)',
        ),
        (
            resized("mtp.0.attn.wo_a.weight", "F8_E4M3", (64, 100)),
            '"mtp.0.attn.wo_a.weight" must cut 6 heads of 64 into equal groups, got',
        ),
        (
            resized("mtp.0.attn.attn_sink", "F32", (2, 3)),
            '"mtp.0.attn.attn_sink" must have 1 axes, got shape (2, 3)',
        ),
        (
            resized("mtp.0.hc_attn_base", "F32", (20,)),
            "mixes of \"hc_mult\" = 4 copies, 24, got 20",
        ),
        (
            resized("mtp.2.confidence_head.proj.weight", "BF16", (1, 50)),
            '"mtp.2.confidence_head.proj.weight" must have shape (40,)',
        ),
        (
            resized("mtp.0.attn.wq_b.scale", "F8_E8M0", (2, 1)),
            '"mtp.0.attn.wq_b" must have a "scale" of shape (3, 1) or (12, 1) (FP8), got (2, 1)',
        ),
        (
            resized("mtp.0.ffn.experts.4.w2.scale", "F8_E8M0", (32, 2)),
            '"mtp.0.ffn.experts.4.w2" must have a "scale" of shape (32, 1) (FP4), got (32, 2)',
        ),
        (
            resized("mtp.0.ffn.experts.4.w2.weight", "BF16", (32, 16)),
            '"mtp.0.ffn.experts.4.w2" must hold 8-bit codes beside its scales, got mlx',
        ),
        (
            ("mtp.1.attn.wkv.scale", Raw("F8_E8M0", (1, 1), b"\xff")),
            'scales of "mtp.1.attn.wkv" must be numbers, got E8M0 code 255',
        ),
        (
            ("mtp.1.ffn.experts.2.w1.scale", Raw("F8_E8M0", (32, 1), b"\x7f" * 31 + b"\xff")),
            'scales of "mtp.1.ffn.experts.0.w1 .. mtp.1.ffn.experts.5.w1" must be numbers',
        ),
        (
            ("mtp.1.attn.wkv.scale", Raw("F32", (1, 1), np.float32(0.3).tobytes())),
            'scales of "mtp.1.attn.wkv" must be numbers',
        ),
        (
            resized("mtp.0.ffn.experts.4.w2.weight", "F8_E4M3", (32, 32)),
            '"mtp.0.ffn.experts.4.w2" must be packed like "mtp.0.ffn.experts.0.w2", got mxfp8 and',
        ),
    ],
)  # fmt: skip
def test_wrong_shapes_and_scales_are_named(
    changed: tuple[str, Raw], message: str, tmp_path: Path
) -> None:
    b = bundle()
    assert changed[0] in b.stored
    b.stored[changed[0]] = changed[1]
    if "packed like" in message:
        b.stored["mtp.0.ffn.experts.4.w2.scale"] = Raw("F8_E8M0", (1, 1), b"\x7f")
    write_bundle(tmp_path, b)
    assert message in refusal(tmp_path)


def test_a_table_of_experts_that_are_not_there_is_named(tmp_path: Path) -> None:
    b = bundle(hashed_drafts=True)
    raw = b.stored["mtp.1.ffn.gate.tid2eid"]
    b.stored["mtp.1.ffn.gate.tid2eid"] = Raw("I64", raw.shape, (6).to_bytes(8, "little") * 80)
    write_bundle(tmp_path, b)
    assert '"mtp.1.ffn.gate.tid2eid" must name experts 0..5, got 6..6' in refusal(tmp_path)


def test_scales_may_be_floats_that_are_powers_of_two(tmp_path: Path) -> None:
    b = bundle()
    write_bundle(tmp_path / "codes", b)
    for name, raw in list(b.stored.items()):
        if raw.kind == "F8_E8M0":
            exponents = np.frombuffer(raw.data, np.uint8).astype(np.float32) - 127
            b.stored[name] = Raw("F32", raw.shape, (2.0**exponents).astype(np.float32).tobytes())
    write_bundle(tmp_path / "floats", b)
    stages = [load(tmp_path / name)._body._stages for name in ("codes", "floats")]
    for one, other in zip(*stages, strict=True):
        ours, theirs = one.attention.q_up.quantised, other.attention.q_up.quantised
        assert mx.array_equal(ours.scales, theirs.scales)


@pytest.mark.parametrize(
    ("generation", "change", "message"),
    [
        ("v4", {"dspark_block_size": None}, '"dspark_block_size" in config.json must be a whole'),
        ("v4", {"dspark_block_size": 0}, "must be a whole number of at least 1, got 0"),
        ("v4", {"dspark_noise_token_id": 40}, "one of the target's 40 tokens, got 40"),
        ("v4", {"dspark_target_layer_ids": [4, 5, 6]}, "must ascend within the 6 target layers"),
        ("v4", {"dspark_target_layer_ids": "345"}, "must be a list of layers, got '345'"),
        ("v4", {"num_hidden_layers": 7}, "of a 7-layer target, got a target with 6 layers"),
        ("v4", {"scoring_func": "softmax"}, 'must be "sqrtsoftplus", got "softmax"'),
        ("v4", {"num_experts_per_tok": 7}, "must be 1..6, the experts of a draft stage, got 7"),
        ("v4", {"hc_mult": 2}, 'mixes of "hc_mult" = 2 copies, 8, got 24'),
        ("v4", {"qk_rope_head_dim": 65}, "must be even and at most 64, got 65"),
        ("v4", {"sliding_window": None}, '"sliding_window" in config.json'),
        ("v4.1", {"dspark_num_experts_per_tok": 6}, f"must be 1..{DRAFT_EXPERTS}, the experts"),
        ("v4.1", {"dspark_target_layer_ids": [0, 1, 2]}, "behind the first, got layer 0"),
        ("v4.1", {"engram_layer_ids": [1, 4]}, "an engram to the stream first, got layers [4]"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(
    generation: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    b = bundle(generation)
    (b.config if generation == "v4" else b.config["text_config"]).update(change)
    write_bundle(tmp_path, b)
    assert message in refusal(tmp_path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    class Wider(TinyTarget):
        hidden_size = 64

    class Untapped(TinyTarget):
        tap_refusal = "of a test"

    write_bundle(tmp_path, bundle())
    assert "must have its width, got 32 and 64" in refusal(tmp_path, Wider())
    assert "which cannot be tapped: of a test" in refusal(tmp_path, Untapped())
    assert "must have shape (50, 8)" in refusal(tmp_path, TinyTarget(vocab_size=50))


def test_an_engram_away_from_the_tapped_layers_changes_nothing(tmp_path: Path) -> None:
    b = bundle("v4.1")
    b.config["text_config"]["engram_layer_ids"] = [1]
    write_bundle(tmp_path, b)
    assert load(tmp_path).taps == (2, 3, 4)


def test_a_model_that_carries_stages_drafts_for_itself(tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle())
    target, model = TinyTarget(), str(tmp_path)
    auto: Any = load_drafter(None, target, model=model)
    assert isinstance(auto.other, DeepseekV4Drafter)
    drafter = load_drafter(None, target, mode="dspark", model=model, lookup_drafts=False)
    assert isinstance(drafter, DeepseekV4Drafter)
    shards_of(tmp_path)[0][0].unlink()
    with pytest.warns(RuntimeWarning, match="Drafting by lookup: .* missing: model-00005"):
        assert isinstance(load_drafter(None, target, model=model), LookupDrafter)
    with pytest.raises(LoadError, match="missing: model-00005"):
        load_drafter(None, target, mode="dspark", model=model)


@pytest.mark.parametrize("model", ["gguf:owner/file.gguf", "owner/na me", "qwen3", "./here/there"])
def test_names_of_other_kinds_carry_no_stages(model: str) -> None:
    assert files_module.own_drafts(model) is None


def test_of_a_model_on_the_hub_only_the_shards_with_stages_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path, bundle())
    asked: list[list[str]] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(files_module, "snapshot_download", fetch)
    load_drafter("owner/model", TinyTarget(), mode="dspark")
    shards = [path.name for path in shards_of(tmp_path)[0]]
    assert asked == [["*.json"], ["*.json", *shards]]
    monkeypatch.setattr(
        files_module, "try_to_load_from_cache", lambda name, file: str(tmp_path / file)
    )
    drafter = load_drafter(None, TinyTarget(), mode="dspark", model="owner/model")
    assert isinstance(drafter, DeepseekV4Drafter)


def test_a_conversion_without_its_stages_is_told_so(tmp_path: Path) -> None:
    b = bundle()
    b.stored = {name: raw for name, raw in b.stored.items() if not name.startswith("mtp.")}
    b.stored["embed_tokens.weight"] = b.stored.pop("embed.weight")
    write_bundle(tmp_path, b, n_shards=3, n_draft_shards=1)
    message = refusal(tmp_path)
    assert 'must hold its draft stages as "mtp." tensors' in message
    assert "pass the original checkpoint as drafter" in message


def test_a_device_without_packed_products_says_so_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("[gather_qmm] mode mxfp4\nnot supported")

    write_bundle(tmp_path, bundle())
    monkeypatch.setattr(mx, "gather_qmm", missing)
    refuse_without_kernels.cache_clear()
    message = refusal(tmp_path)
    assert 'in "mxfp' in message and "and says: [gather_qmm] mode mxfp4 not supp" in message
    assert message.endswith("Load them in 16 bits.")
    assert load(tmp_path, bits=16).max_draft == 5


def test_a_bundle_is_not_written_again(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a", bundle())
    with pytest.raises(LoadError, match='must be a drafter alone, got "a", a model with draft'):
        quantise_checkpoint(tmp_path / "a", tmp_path / "b")
