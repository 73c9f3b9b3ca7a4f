"""What a checkpoint is follows from its files; what does not fit is refused with the remedy."""

import contextlib
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_core import LoadError, Pair, generate
from spec_drafters import (
    DFlash2Drafter,
    DFlashDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    HybridDrafter,
    LookupDrafter,
    load_drafter,
)
from spec_drafters import load as load_module

from .checkpoints import HIDDEN, VOCAB, TinyTarget, write
from .flash_layouts import FLASH2_LAYOUTS, FLASH_LAYOUTS
from .layouts import LAYOUTS, Layout
from .test_eagle3 import LAYOUTS as EAGLE_LAYOUTS
from .test_eagle3 import DeepTarget


def put(folder: Path, layout: Any) -> Path:
    stored = getattr(layout, "stored", None)
    return write(folder, layout.config, layout.tensors if stored is None else stored)


def altered(layout: Layout, drop: tuple[str, ...] = (), **tensors: np.ndarray) -> Any:
    kept = {k: v for k, v in layout.tensors.items() if k not in drop}
    return Layout(layout.config, kept | tensors, layout.spec, layout.packaging)


@pytest.mark.parametrize(
    ("layouts", "family", "mode"),
    [
        (LAYOUTS, DSparkDrafter, "dspark"),
        (FLASH_LAYOUTS, DFlashDrafter, "dflash"),
        (FLASH2_LAYOUTS, DFlash2Drafter, "dflash"),
        (EAGLE_LAYOUTS, Eagle3Drafter, "eagle3"),
    ],
)
def test_every_layout_is_recognised_by_its_files(
    layouts: Any, family: type, mode: str, tmp_path: Path
) -> None:
    target = DeepTarget() if mode == "eagle3" else TinyTarget()
    for name, make in layouts.items():
        folder = put(tmp_path / name.replace(" ", "_"), make())
        drafter = load_drafter(folder, target, mode=mode)
        assert type(drafter) is family
        assert drafter.name == mode


def test_mode_auto_puts_lookup_in_front(tmp_path: Path) -> None:
    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    drafter = load_drafter(folder, TinyTarget())
    assert isinstance(drafter, HybridDrafter) and isinstance(drafter.other, DSparkDrafter)
    assert isinstance(load_drafter(folder, TinyTarget(), lookup_drafts=False), DSparkDrafter)
    by_name = load_drafter(folder, TinyTarget(), mode="dspark", lookup_drafts=True)
    assert isinstance(by_name, HybridDrafter)


def test_without_a_checkpoint_an_unknown_target_gets_lookup() -> None:
    assert isinstance(load_drafter(None, TinyTarget(), model="some/model"), LookupDrafter)
    assert isinstance(load_drafter(None, TinyTarget()), LookupDrafter)
    for mode in ("auto", "lookup"):
        with pytest.raises(LoadError, match='Without lookup a drafter is needed.*"baseline"'):
            load_drafter(None, TinyTarget(), mode=mode, lookup_drafts=False)
    with pytest.raises(LoadError) as error:
        load_drafter(None, TinyTarget(), mode="dspark", model="some/model")
    assert str(error.value) == (
        '[load] Mode "dspark" needs a drafter for "some/model", and no pair is known. '
        'Pass one, or use mode "lookup".'
    )
    with pytest.raises(LoadError, match="needs a drafter for this target, and no pair is known"):
        load_drafter(None, TinyTarget(), mode="dspark")


def test_who_asks_for_a_mode_that_no_pair_has_is_told_of_a_head_that_loads() -> None:
    with pytest.raises(LoadError) as error:
        load_drafter(None, TinyTarget(), mode="eagle3", model="mlx-community/Qwen3-8B-8bit")
    assert str(error.value).endswith(
        'Pass one, such as "RedHatAI/Qwen3-8B-speculator.eagle3", or use mode "lookup".'
    )


def test_a_known_target_gets_its_own_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    asked: list[Any] = []

    def locate(name: Path | str) -> Path:
        asked.append(name)
        return folder

    monkeypatch.setattr(load_module, "locate", locate)
    drafter = load_drafter(None, TinyTarget(), model="mlx-community/Qwen3-8B-4bit")
    assert asked == ["deepseek-ai/dspark_qwen3_8b_block7"]
    assert isinstance(drafter, HybridDrafter)


def test_an_unreachable_known_drafter_warns_in_auto_and_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def locate(name: Path | str) -> Path:
        raise LoadError("[load] offline")

    monkeypatch.setattr(load_module, "locate", locate)
    with pytest.warns(RuntimeWarning, match="Drafting by lookup: .*offline"):
        drafter = load_drafter(None, TinyTarget(), model="Qwen3-8B-4bit")
    assert isinstance(drafter, LookupDrafter)
    with pytest.raises(LoadError, match="offline"):
        load_drafter(None, TinyTarget(), mode="dspark", model="Qwen3-8B-4bit")


def test_a_drafter_that_breaks_off_is_refused_by_name_and_done_without_in_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft(self: Any, *arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("[quantized_matmul] wrong shape")

    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    monkeypatch.setattr(DSparkDrafter, "draft", draft)
    monkeypatch.setattr(load_module, "locate", lambda name: folder)
    for named in ({"mode": "dspark"}, {"mode": "auto"}):
        with pytest.raises(LoadError, match=r"and breaks off: \[quantized_matmul\] wrong shape"):
            load_drafter(folder, TinyTarget(), **named)
    with pytest.warns(RuntimeWarning, match="Drafting by lookup: .*breaks off"):
        drafter = load_drafter(None, TinyTarget(), model="Qwen3-8B-4bit")
    assert drafter.name == "lookup"


@pytest.mark.parametrize("value", ["x", None, -1, 1e30, [], {}, float("nan")])
def test_settings_of_a_wrong_kind_are_refused_or_harmless(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for make in (LAYOUTS["deepspec, own ends"], FLASH_LAYOUTS["z-lab"], EAGLE_LAYOUTS["original"]):
        for i, key in enumerate(make().config):
            layout = make()
            layout.config[key] = value
            folder = put(tmp_path / f"{id(make)}-{i}", layout)
            target = DeepTarget() if make in EAGLE_LAYOUTS.values() else TinyTarget()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # such as a base that is not there
                with contextlib.suppress(LoadError):
                    load_drafter(folder, target, mode="auto")
    layout = LAYOUTS["deepspec, own ends"]()
    layout.config["vocab_size"] = "many"
    folder = put(tmp_path / "words", layout)
    with pytest.raises(LoadError, match=r'Drafter "words" must have sound settings .* \'many\''):
        load_drafter(folder, TinyTarget())
    monkeypatch.setattr(load_module, "locate", lambda name: folder)
    with pytest.warns(RuntimeWarning, match="Drafting by lookup: .*sound settings"):
        assert load_drafter(None, TinyTarget(), model="Qwen3-8B-4bit").name == "lookup"
    with pytest.raises(LoadError, match="sound settings"):
        load_drafter(None, TinyTarget(), model="Qwen3-8B-4bit", lookup_drafts=False)


def test_an_option_of_a_wrong_value_is_not_blamed_on_the_config_alone(tmp_path: Path) -> None:
    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    with pytest.raises(LoadError, match=r"and sound options, here dtype, and fails with"):
        load_drafter(folder, TinyTarget(), dtype="float7")


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (
            LAYOUTS["deepspec, own ends"],
            {"foo": 1},
            'Options of DSparkDrafter must be among dtype, truncate, got "foo". Leave it out.',
        ),
        (
            FLASH2_LAYOUTS["dflash2"],
            {"trunkate": True},
            "Options of DFlash2Drafter must be among dtype, embed_scale, truncate, "
            'got "trunkate". Did you mean "truncate"?',
        ),
        (
            None,
            {"max_drafts": 4},
            "Options of LookupDrafter must be among max_draft, min_match, short_draft, "
            'got "max_drafts". Did you mean "max_draft"?',
        ),
    ],
)
def test_an_option_that_the_drafter_lacks_is_named_beside_those_it_has(
    layout: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = None if layout is None else put(tmp_path, layout())
    for mode in ("auto",) if layout is not None else ("auto", "lookup"):
        with pytest.raises(TypeError) as error:
            load_drafter(folder, TinyTarget(), mode=mode, **options)
        assert str(error.value) == f"[load] {message}"


def test_an_option_that_is_wrong_is_not_taken_for_a_drafter_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    monkeypatch.setattr(load_module, "locate", lambda name: folder)
    with pytest.raises(TypeError, match='got "foo"'):
        load_drafter(None, TinyTarget(), model="Qwen3-8B-4bit", foo=1)


def test_lookup_gets_its_options_however_it_is_chosen() -> None:
    for mode in ("auto", "lookup"):
        assert load_drafter(None, TinyTarget(), mode=mode, max_draft=5).max_draft == 5


def test_a_drafter_without_a_rope_base_says_which_is_taken(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    theta = layout.config.pop("rope_theta")
    with pytest.warns(RuntimeWarning, match=r'holds no "rope_theta", so 1e\+06 is taken'):
        load_drafter(put(tmp_path / "none", layout), TinyTarget())
    layout.config["rope_scaling"] = {"rope_theta": theta, "rope_type": "default"}
    load_drafter(put(tmp_path / "scaling", layout), TinyTarget())  # warnings are errors


def test_another_mode_than_the_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "head", LAYOUTS["deepspec, own ends"]())
    with pytest.raises(LoadError, match=r'Mode "dflash" needs .* got a "dspark" one in "head"'):
        load_drafter(folder, TinyTarget(), mode="dflash")
    with pytest.raises(ValueError, match='got "dsprak"'):
        load_drafter(folder, TinyTarget(), mode="dsprak")


def refusal(folder: Path, layout: Any, target: Any = None, **options: Any) -> str:
    put(folder, layout)
    with pytest.raises(LoadError) as caught:
        load_drafter(folder, target or TinyTarget(), **options)
    return str(caught.value)


class Deeper(TinyTarget):
    n_layers = 9


class Wider(TinyTarget):
    hidden_size = 48


class Untappable(TinyTarget):
    tap_refusal = "layers run twice"


def test_another_target_is_refused(tmp_path: Path) -> None:
    head = LAYOUTS["deepspec, gated markov"]()
    assert refusal(tmp_path, head, Deeper()) == (
        "[dspark] Checkpoint taps layers (1, 3) of a 6-layer target, got a target with 9 layers. "
        "Use the drafter made for it."
    )
    message = refusal(tmp_path, head, Wider())
    assert '"embed_tokens"' in message and "32 and 48" in message
    message = refusal(tmp_path, head, TinyTarget(vocab_size=50))
    assert "must share a vocabulary, got 40 and 50 tokens" in message
    message = refusal(tmp_path, head, Untappable())
    assert "cannot be tapped: layers run twice. Use lookup or a draft model." in message


def test_own_ends_of_another_target_width_are_refused_by_shape(tmp_path: Path) -> None:
    message = refusal(tmp_path, LAYOUTS["deepspec, own ends"](), Wider())
    assert '"fc.weight" must have shape (32, 96)' in message and "got (32, 64)" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    layout = altered(LAYOUTS["deepspec, own ends"](), ("layers.1.mlp.up_proj.weight",))
    assert 'must hold "layers.1.mlp.up_proj.weight"' in refusal(tmp_path, layout)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    layout = altered(LAYOUTS["deepspec, own ends"](), **{"layers.0.extra.weight": np.ones(3)})
    message = refusal(tmp_path, layout)
    assert '"layers.0.extra.weight" without one' in message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, three shards"]()
    write(tmp_path, layout.config, layout.tensors, n_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"names 3 shards, got 2; missing: model-00002"):
        load_drafter(tmp_path, TinyTarget())


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS"),
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"\0" * 64, "an empty or zeroed file"),
        (b"GGUF\3\0\0\0" + b"\0" * 40, "a GGUF file"),
        (b"\xff" * 100, "a cut or damaged file"),
        (b"", "an empty or zeroed file"),
    ],
)
def test_a_file_that_is_no_safetensors_is_described(
    content: bytes, looks: str, tmp_path: Path
) -> None:
    put(tmp_path, LAYOUTS["deepspec, own ends"]())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        LoadError, match=f"must be a safetensors file, got {len(content)} bytes"
    ) as e:
        load_drafter(tmp_path, TinyTarget())
    assert looks in str(e.value)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="must hold safetensors files, got none"):
        load_drafter(tmp_path, TinyTarget())
    put(tmp_path, LAYOUTS["deepspec, own ends"]())
    (tmp_path / "config.json").unlink()
    with pytest.raises(LoadError, match='must hold "config.json", got none'):
        load_drafter(tmp_path, TinyTarget())
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(LoadError, match='"config.json" must be JSON, got an HTML page'):
        load_drafter(tmp_path, TinyTarget())
    with pytest.raises(LoadError, match=r'must be a folder or <owner>/<name> on the hub, got "x"'):
        load_drafter("x", TinyTarget())


@pytest.mark.parametrize(
    ("d2t", "problem"),
    [
        (None, 'needs a "d2t" map, got none'),
        (np.zeros(24, dtype=int), "got all zeros"),
        (np.zeros(23, dtype=int) + 1, "got 23 entries"),
        (np.full(24, 30), "got target ids 30..53"),
        (np.arange(24) * -1 + 5, "got 23 repeated target ids"),
    ],
)
def test_a_reduced_vocabulary_needs_a_sound_map(
    d2t: np.ndarray | None, problem: str, tmp_path: Path
) -> None:
    layout = LAYOUTS["speculators, reduced"]()
    new = {} if d2t is None else {"d2t": d2t}
    assert problem in refusal(tmp_path, altered(layout, ("d2t",), **new))


def test_a_map_over_the_whole_vocabulary_is_refused(tmp_path: Path) -> None:
    layout = altered(LAYOUTS["deepspec, own ends"](), d2t=np.zeros(VOCAB, dtype=int))
    assert "got one with all 40 tokens" in refusal(tmp_path, layout)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ("mtp.0.attn.wq_a.weight", "a multi-token-prediction layer without a DSpark head"),
        ("layer_fusion_weights", "a DFly head"),
        ("medusa_head.0.weight", "Medusa heads"),
        ("target_model.embed_tokens.weight", "a drafter with its whole target inside"),
    ],
)
def test_heads_of_other_algorithms_are_named(tensor: str, reason: str, tmp_path: Path) -> None:
    layout = altered(LAYOUTS["deepspec, own ends"](), **{tensor: np.ones((2, 2))})
    message = refusal(tmp_path, layout)
    assert f"got {reason}" in message and "Use lookup" in message


def test_unsupported_algorithms_are_named(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators, anchor dropped"]()
    keys = json.loads(json.dumps(layout.config)) | {"speculators_model_type": "peagle"}
    renamed = Layout(keys, layout.tensors, layout.spec, layout.packaging)
    assert 'got "peagle". Use lookup' in refusal(tmp_path / "a", renamed)
    layout = FLASH_LAYOUTS["z-lab"]()
    layout.config["dflash_config"]["projector_type"] = "domino"
    assert 'must be "dflash" or "dspark", got "domino"' in refusal(tmp_path / "b", layout)
    layout = LAYOUTS["deepspec, own ends"]()
    layout.config["markov_head_type"] = "transformer"
    assert 'vanilla, gated or rnn, got "transformer"' in refusal(tmp_path / "c", layout)
    layout = LAYOUTS["specforge"]()
    layout.config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    assert '"linear", "llama3" or "yarn", got "longrope"' in refusal(tmp_path / "d", layout)
    layout = LAYOUTS["deepspec, own ends"]()
    del layout.config["block_size"]
    layout.config["dspark_block_size"] = 5
    assert 'must hold its draft stages as "mtp." tensors, got none' in refusal(
        tmp_path / "e", layout
    )


@pytest.mark.parametrize("packed", ["weight_packed", "qweight"])
def test_integer_packings_of_other_engines_are_refused_by_name(packed: str, tmp_path: Path) -> None:
    """As compressed-tensors writes W4A16: eight codes in an int32."""
    layout = LAYOUTS["deepspec, own ends"]()
    name = "layers.0.mlp.up_proj"
    rows = layout.tensors[f"{name}.weight"].shape[0]
    more = {
        f"{name}.{packed}": np.ones((rows, HIDDEN // 8)),
        f"{name}.weight_scale": np.ones((rows, 1)),
    }
    message = refusal(tmp_path, altered(layout, (f"{name}.weight",), **more))
    assert f'got "{name}.{packed}", as compressed-tensors' in message
    assert "Use its bf16 checkpoint" in message


@pytest.mark.parametrize("found", [0.5, [1.0, 0.0], ["warm"], {}])
def test_confidence_temperatures_that_divide_nothing_are_refused(
    found: Any, tmp_path: Path
) -> None:
    layout = LAYOUTS["qwen3.5 fork"]()
    layout.config["confidence_temperatures"] = found
    message = refusal(tmp_path, layout)
    assert f'"confidence_temperatures" must be a list of numbers > 0, got {found!r}' in message


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, LAYOUTS["deepspec, own ends"]())
    (folder / "config.json").write_text("[]")
    with pytest.raises(LoadError, match=r'"config.json" must be a JSON object, got \[\]. Download'):
        load_drafter(folder, TinyTarget())


def test_missing_settings_are_named(tmp_path: Path) -> None:
    for key in ("mask_token_id", "target_layer_ids", "hidden_size", "intermediate_size"):
        layout = LAYOUTS["deepspec, own ends"]()
        del layout.config[key]
        assert f'must hold "{key}", got none' in refusal(tmp_path / key, layout)
    layout = LAYOUTS["deepspec, own ends"]()
    del layout.config["block_size"]
    assert "got block_size 0" in refusal(tmp_path / "block", layout)
    layout = LAYOUTS["speculators, anchor dropped"]()
    del layout.config["transformer_layer_config"]["num_attention_heads"]
    assert "got none for num_attention_heads" in refusal(tmp_path / "body", layout)
    layout = LAYOUTS["speculators, anchor dropped"]()
    layout.config["aux_hidden_state_layer_ids"] = [0, 2]
    assert "must be outputs of layers (auxiliary ids from 1), got [0, 2]" in refusal(
        tmp_path / "aux", layout
    )


def test_a_threshold_without_a_confidence_head_is_refused(tmp_path: Path) -> None:
    for name, layout in (
        ("dspark", LAYOUTS["deepspec, rank 0"]()),
        ("dflash", next(iter(FLASH_LAYOUTS.values()))()),
    ):
        message = refusal(tmp_path / name, layout, confidence_threshold=0.3)
        assert "A confidence threshold needs a confidence head" in message
    for mode in ("auto", "lookup"):
        with pytest.raises(LoadError, match="what runs here is lookup"):
            load_drafter(None, TinyTarget(), mode=mode, confidence_threshold=0.3)
    assert load_drafter(None, TinyTarget(), confidence_threshold=0.0).name == "lookup"


def test_bits_and_the_report(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, prefixes"]()
    folder = put(tmp_path, layout)
    sizes = []
    for bits in (16, 8, 4):
        drafter = load_drafter(folder, TinyTarget(), mode="dspark", bits=bits)
        report = drafter.report  # type: ignore[attr-defined]
        assert report.bits == bits
        assert report.ignored == ("verifier_norm.weight",)
        assert report.missing == ("embed_tokens", "lm_head")
        assert set(report.loaded) == set(layout.tensors)
        sizes.append(report.nbytes)
    assert sizes == sorted(sizes, reverse=True)
    # 2 layers of 6 matrices and fc; no group divides the 48 columns of down_proj and the 8 of the
    # Markov tables.
    assert "29 tensors loaded" in str(report)
    assert "13 matrices in 4 bits; from the target: embed_tokens, lm_head" in str(report)
    with pytest.raises(LoadError, match=r"Drafter bits must be 4, 8 or 16, got 3\."):
        load_drafter(folder, TinyTarget(), bits=3)


def test_norms_confidence_and_log_snr_are_never_quantised(tmp_path: Path) -> None:
    folder = put(tmp_path, LAYOUTS["bonsai"]())
    drafter = load_drafter(folder, TinyTarget(), mode="dspark", bits=4)
    assert isinstance(drafter, DSparkDrafter)
    assert drafter.report.n_quantised == 2 * 6 + 1 + 2  # layers, fc, own ends
    assert drafter._chain.confidence is not None
    assert drafter._chain.confidence.weight.shape == (HIDDEN + 8,)


@pytest.mark.parametrize("layout", [LAYOUTS["deepspec, own ends"], FLASH2_LAYOUTS["dflash2"]])
def test_a_loaded_drafter_serves_one_thread_after_another(layout: Any, tmp_path: Path) -> None:
    made, target = layout(), TinyTarget()
    write(tmp_path, made.config, made.tensors)
    pair = Pair(target, load_drafter(tmp_path, target))

    def answer() -> list[int]:
        return [t for r in generate(pair, [1, 2, 3], max_tokens=30) for t in r.tokens]

    found: list[list[int]] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(answer).result())
    assert found == [answer()] * 2


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((DSparkDrafter, layout) for layout in LAYOUTS.values()),
        *((DFlashDrafter, layout) for layout in FLASH_LAYOUTS.values()),
        *((DFlash2Drafter, layout) for layout in FLASH2_LAYOUTS.values()),
        *((Eagle3Drafter, layout) for layout in EAGLE_LAYOUTS.values()),
    ],
)
def test_what_a_class_loads_serves_in_another_thread(
    family: Any, layout: Any, tmp_path: Path
) -> None:
    target = DeepTarget() if family is Eagle3Drafter else TinyTarget()
    folder = put(tmp_path, layout())
    with ThreadPoolExecutor(1) as pool:
        drafter = pool.submit(family.load, folder, target).result()
    assert list(generate(Pair(target, drafter), [1, 2, 3], max_tokens=8))
