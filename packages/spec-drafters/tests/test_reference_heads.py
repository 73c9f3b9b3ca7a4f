"""The trained heads against traces that another implementation wrote, in float32."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_core import Draft, Pair, Sampling, TargetOutput, generate
from spec_drafters import DFlashDrafter, DSparkDrafter

from .smollm2 import SmolTarget

END_OF_TURN = 2
HEADS = {
    "smollm2-135m-dspark-b7": DSparkDrafter,
    "smollm2-135m-dflash-b8": DFlashDrafter,
}


class Recorder:
    """Passes everything on to a drafter and keeps its drafts."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.drafts: list[Draft] = []
        self.name, self.taps, self.max_draft = drafter.name, drafter.taps, drafter.max_draft

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        self.drafts.append(self._drafter.draft(anchor, cap, sampling=sampling, key=key))
        return self.drafts[-1]

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        self._drafter.observe(tokens, output)

    def reset(self) -> None:
        self._drafter.reset()

    def state(self) -> Any:
        return self._drafter.state()

    def restore(self, state: Any) -> None:
        self._drafter.restore(state)


def check_trace(target: SmolTarget, drafter: Any, trace: dict[str, Any], n_rounds: int) -> None:
    """Run the loop on a trace's prompt; each round and every committed id must agree."""
    recorder = Recorder(drafter)
    pair = Pair(target, recorder)  # pyright: ignore[reportArgumentType]
    want, committed = trace["rounds"][:n_rounds], []
    rounds = generate(pair, trace["prompt_ids"], stop_ids=[END_OF_TURN])
    first = next(rounds)
    committed += first.tokens
    for n, expected in enumerate(want):
        assert committed[-1] == expected["anchor"], f"anchor of round {n}"
        round_ = next(rounds)
        draft = recorder.drafts[n]
        assert draft.tokens.tolist() == expected["drafted_ids"], f"drafts of round {n}"
        # The trace counts an accepted end-of-turn token and stops there.
        assert min(round_.n_accepted, len(round_.tokens)) == expected["accepted"], f"round {n}"
        if expected["confidence"]:
            assert draft.confidence is not None
            assert draft.confidence.tolist() == pytest.approx(expected["confidence"], abs=6e-5)
        committed += round_.tokens
    if len(want) == len(trace["rounds"]):
        assert committed == trace["committed_ids"]
    else:
        assert committed == trace["committed_ids"][: len(committed)]


def load(name: str, folder: Path, target: SmolTarget) -> Any:
    return HEADS[name].load(folder / name, target, bits=16)


def traces(folder: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((folder / name / "traces.json").read_text("utf-8"))["prompts"]


@pytest.mark.weights
@pytest.mark.parametrize("name", HEADS)
def test_first_rounds_equal_the_trace(
    name: str, reference_models: Path, smollm2: SmolTarget
) -> None:
    drafter = load(name, reference_models, smollm2)
    check_trace(smollm2, drafter, traces(reference_models, name)[0], n_rounds=4)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_round_of_every_prompt_equals_the_trace(
    name: str, reference_models: Path, smollm2: SmolTarget
) -> None:
    drafter = load(name, reference_models, smollm2)
    for trace in traces(reference_models, name):
        check_trace(smollm2, drafter, trace, n_rounds=len(trace["rounds"]))
