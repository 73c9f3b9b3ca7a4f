"""The drafter options, on the tiny model for refusals and on the embedded default for real."""

import json

import pytest

import spec_demo


def test_a_mode_with_weights_asks_for_them(spec, tiny_folder):
    code, _, err = spec("generate", "Hi", "--model", tiny_folder, "--mode", "dspark")
    assert code == 1 and "needs a drafter" in err


def test_a_drafter_made_for_another_target_is_refused(spec, tiny_folder):
    folder = spec_demo.drafter_folder()
    for mode in ("auto", "dspark"):
        code, out, err = spec(
            "generate", "Hi", "--model", tiny_folder, "--drafter", folder, "--mode", mode
        )
        assert code == 1 and out == "" and len(err.strip().splitlines()) <= 3, err


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
