"""The drafter options, on the tiny model for refusals and on the embedded default for real."""

import json
import shutil
from inspect import signature

import pytest

import spec_demo
from spec_cli import main, opening
from spec_drafters import load_drafter


def test_a_mode_with_weights_asks_for_them(spec, tiny_folder):
    code, _, err = spec("generate", "Hi", "--model", tiny_folder, "--mode", "dspark")
    assert code == 1 and "needs a drafter" in err


def test_without_lookup_and_without_a_drafter_there_is_a_message(spec, tiny_folder):
    code, out, err = spec("generate", "Hi", "--model", tiny_folder, "--no-lookup-drafts")
    assert (code, out) == (1, "") and "Without lookup a drafter is needed" in err


def test_a_drafter_made_for_another_target_is_refused(spec, tiny_folder):
    folder = spec_demo.drafter_folder()
    for mode in ("auto", "dspark"):
        code, out, err = spec(
            "generate", "Hi", "--model", tiny_folder, "--drafter", folder, "--mode", mode
        )
        assert code == 1 and out == "" and len(err.strip().splitlines()) <= 3, err


@pytest.mark.parametrize("option", [("--drafter-window", 7), ("--drafter-bits", 8)])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("lookup", "lookup"), ("lookup", "auto"), ("baseline", "baseline"), ("draft-model", "auto")],
)
def test_an_option_that_changes_nothing_is_named(spec, tiny_folder, option, kind, mode):
    drafter = ("--drafter", tiny_folder) if kind == "draft-model" else ()
    command = ("generate", "Hi", "--model", tiny_folder, "--max-tokens", 2, "--max-draft", 2)
    code, _, err = spec(*command, "--mode", mode, *drafter, *option)
    assert code == 0 and f"{option[0]} changes nothing for {kind}. Leave it out." in err
    _, _, err = spec(*command, "--mode", mode, *drafter)
    assert option[0] not in err


def test_the_defaults_that_are_shown_are_those_of_the_drafters():
    given = signature(load_drafter).parameters
    assert given["bits"].default == opening.DRAFTER_BITS
    assert given["window"].default == opening.DRAFTER_WINDOW


def test_a_benchmark_names_a_drafter_that_is_not_there(spec, tiny_folder):
    code, _, err = spec("benchmark", "--model", tiny_folder, "--drafter", "/no/folder")
    assert code == 1 and "/no/folder" in err


@pytest.mark.weights
def test_the_embedded_default_drafts_with_its_own_head(spec, demo_folder):
    ids = {}
    for mode in ("baseline", "dspark"):
        drafter = () if mode == "baseline" else ("--drafter", spec_demo.drafter_folder())
        code, out, err = spec(
            "generate", "1, 2, 3, 4,", "--raw", "--model", demo_folder, "--mode", mode,
            "--drafter-bits", 8, "--max-tokens", 8, "--max-draft", 3, "--json", *drafter,
        )  # fmt: skip
        assert code == 0, err
        result = json.loads(out)
        ids[mode] = result["token_ids"]
    assert ids["dspark"] == ids["baseline"]
    assert result["mode"] == "dspark" and result["acceptance_length"] > 1.5


@pytest.mark.weights
def test_a_damaged_drafter_is_refused_by_name_and_done_without_in_auto(
    spec, demo_folder, tmp_path, monkeypatch
):
    folder = tmp_path / "cut"
    shutil.copytree(spec_demo.drafter_folder(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.setattr(opening, "embedded_drafter", lambda: str(folder))
    monkeypatch.setattr(opening, "_embedded", lambda: ("SmolLM2", demo_folder))
    settings = ("generate", "Hi", "--max-tokens", 2, "--max-draft", 1)
    for named in (("--drafter", folder), ("--mode", "dspark")):
        code, out, err = spec(*settings, *named)
        assert (code, out) == (1, "") and '"model.safetensors" must be a whole' in err
    code, _, err = spec(*settings, "--no-lookup-drafts")
    assert code == 1 and '"model.safetensors" must be a whole' in err
    code, out, err = spec(*settings, "--json")
    assert code == 0 and "Drafting by lookup: [load]" in err
    assert json.loads(out)["mode"] == "lookup"


def test_a_warning_is_one_line_without_code(capsys):
    main.tell_warning("[draft] Odd.", RuntimeWarning, "loop.py", 12)
    main.tell_warning("old", DeprecationWarning, "x.py", 1, line="import x")
    assert capsys.readouterr().err == "[draft] Odd.\nDeprecationWarning: old\n"
