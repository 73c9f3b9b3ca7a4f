"""DeepSeek's bundled draft stages: every stage against NumPy, and end to end on a V4 target."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Pair, Sampling, StatsMeter, TargetOutput, generate
from spec_core.testing import check_drafter, check_target
from spec_drafters import DeepseekV4Drafter, HybridDrafter, load_drafter
from spec_drafters._hyper import collapse

from .checkpoints import TinyTarget
from .deepseek_layouts import (
    BLOCK,
    HIDDEN,
    N_STAGES,
    VOCAB,
    WINDOW,
    Bundle,
    bundle,
    in_inference_spelling,
    write_bundle,
)
from .deepseek_reference import NumpyTarget, chain, draft_block, taught
from .test_distribution import excess

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def load(folder: Path, b: Bundle, target: Any, **options: Any) -> DeepseekV4Drafter:
    write_bundle(folder, b)
    drafter = load_drafter(folder, target, mode="dspark", **options)
    assert isinstance(drafter, DeepseekV4Drafter)
    return drafter


class Streams:
    """Keeps what each stage of a drafter returns."""

    def __init__(self, drafter: DeepseekV4Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[np.ndarray] = []
        for name in ("_forward", "_forward_lagging"):
            monkeypatch.setattr(drafter._body, name, self._kept(getattr(drafter._body, name)))

    def _kept(self, original: Any) -> Any:
        def call(*args: Any) -> Any:
            result = original(*args)
            stream = result[0] if isinstance(result, tuple) else result
            self.seen.append(np.array(stream.astype(mx.float32)))
            return result

        return call


def compare(drafter: DeepseekV4Drafter, b: Bundle, target: Any, streams: Streams) -> None:
    """Drafts behind contexts shorter than the window, just as long, and several times as long."""
    rng = np.random.default_rng(5)
    embedding = np.array(target.embed(mx.arange(VOCAB))).astype(np.float64)
    head = np.array(target.unembed(mx.eye(HIDDEN))).astype(np.float64).T
    taps = np.zeros((0, N_STAGES * HIDDEN))
    for n_rows in (1, 3, WINDOW - 4, 1, 5, 2 * WINDOW + 3, 4, 1):
        new = rng.normal(size=(n_rows, N_STAGES * HIDDEN)).astype(np.float32)
        taps = np.concatenate([taps, new])
        parts = tuple(mx.array(part) for part in np.split(new, N_STAGES, axis=1))
        drafter.observe([0] * n_rows, TargetOutput(mx.zeros((n_rows, 1)), parts))
        anchor = int(rng.integers(0, VOCAB))
        want = draft_block(b, taps, anchor, embedding, head)
        streams.seen.clear()
        settings = Sampling(temperature=0.7)
        draft = drafter.draft(anchor, BLOCK, sampling=settings, key=mx.random.key(n_rows))
        for stage, (got, stream) in enumerate(zip(streams.seen, want.streams, strict=True)):
            np.testing.assert_allclose(
                got, stream, atol=1e-4 * np.abs(stream).max(), err_msg=f"{stage}"
            )
        tokens: Any = draft.tokens.tolist()
        _, logits, chances = chain(b, want, anchor, lambda i, _, t=tokens: t[i])
        logits = logits / 0.7
        logits -= logits.max(-1, keepdims=True)
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        np.testing.assert_allclose(np.array(draft.probs), probs, atol=1e-4)
        np.testing.assert_allclose(np.array(draft.confidence), chances, atol=1e-4)
        greedy = drafter.draft(anchor, BLOCK, sampling=Sampling(), key=mx.random.key(0))
        best, logits, _ = chain(b, want, anchor, lambda _, row: int(row.argmax()))
        margins = np.sort(logits)[:, -1] - np.sort(logits)[:, -2]
        assert margins.min() > 1e-3, "pick another seed: a tie proves nothing"
        assert greedy.tokens.tolist() == best


@pytest.mark.parametrize("generation", ["v4", "v4.1"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_stage_equals_the_equations(
    generation: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, target = bundle(generation, packed=packed), TinyTarget()
    drafter = load(tmp_path, b, target, bits=16)
    compare(drafter, b, target, Streams(drafter, monkeypatch))


@pytest.mark.parametrize("generation", ["v4", "v4.1"])
def test_packed_matrices_stay_packed_and_say_the_same(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, target = bundle(generation), TinyTarget()
    drafter = load(tmp_path, b, target, bits=8)
    body: Any = drafter._body
    assert body._stages[0].mixture.routed[0].quantised.mode == "mxfp4"
    assert body._stages[0].attention.q_up.quantised.mode == "mxfp8"
    # Per stage 5 of attention, 3 stacks of experts, 3 shared ones; the projection of the taps. The
    # Markov tables have too few columns for a group.
    assert drafter.report.n_quantised == N_STAGES * 11 + 1
    compare(drafter, b, target, Streams(drafter, monkeypatch))


def test_a_stage_that_routes_by_token_looks_its_experts_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, target = bundle(hashed_drafts=True), TinyTarget()
    drafter = load(tmp_path, b, target, bits=16)
    compare(drafter, b, target, Streams(drafter, monkeypatch))


def test_the_settings_of_the_inference_code_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, target = bundle(), TinyTarget()
    b.config = in_inference_spelling(b.config)
    drafter = load(tmp_path, b, target, bits=16)
    compare(drafter, b, target, Streams(drafter, monkeypatch))


def test_taps_are_of_layer_outputs_in_both_generations(tmp_path: Path) -> None:
    target = TinyTarget()
    assert load(tmp_path / "a", bundle("v4"), target).taps == (3, 4, 5)
    assert load(tmp_path / "b", bundle("v4.1"), target).taps == (2, 3, 4)


def test_a_wrong_reading_of_the_equations_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is far below what a mistake changes: copies folded with the wrong weights."""
    b, target = bundle(), TinyTarget()
    drafter = load(tmp_path, b, target, bits=16)
    monkeypatch.setattr(
        "spec_drafters._stages.collapse", lambda x, pre: collapse(x, mx.ones_like(pre) / 4)
    )
    with pytest.raises(AssertionError):
        compare(drafter, b, target, Streams(drafter, monkeypatch))


@pytest.mark.parametrize("generation", ["v4", "v4.1"])
def test_it_keeps_the_contract(generation: str, tmp_path: Path) -> None:
    drafter = load(tmp_path, bundle(generation), TinyTarget())
    check_drafter(drafter, vocab_size=VOCAB, hidden_size=HIDDEN)


def test_mode_auto_puts_lookup_in_front_and_a_threshold_cuts(tmp_path: Path) -> None:
    b, target = bundle(), TinyTarget()
    write_bundle(tmp_path, b)
    auto = load_drafter(tmp_path, target)
    assert isinstance(auto, HybridDrafter) and isinstance(auto.other, DeepseekV4Drafter)
    sure = load_drafter(tmp_path, target, mode="dspark", confidence_threshold=1.0)
    sure.observe(PROMPT, target.prefill(PROMPT, target.make_cache(), taps=sure.taps))
    assert sure.draft(1, 5, sampling=Sampling(), key=mx.random.key(0)).n_drafted == 0


@pytest.mark.parametrize("generation", ["v4", "v4.1"])
def test_what_the_class_loads_serves_in_another_thread(generation: str, tmp_path: Path) -> None:
    write_bundle(tmp_path, bundle(generation))
    target = TinyTarget()
    with ThreadPoolExecutor(1) as pool:
        drafter = pool.submit(DeepseekV4Drafter.load, tmp_path, target).result()
    assert ids(generate(Pair(target, drafter), PROMPT, max_tokens=8))


def test_the_target_of_these_tests_keeps_the_contract() -> None:
    target: Any = NumpyTarget(bundle())
    check_target(target, prompt=PROMPT, taps=(2, 5), n_rounds=6, max_block=5)


def ids(rounds: Any) -> list[int]:
    return [token for round_ in rounds for token in round_.tokens]


def test_greedy_ids_equal_plain_decoding_over_200_rounds(tmp_path: Path) -> None:
    b = taught(bundle(seed=3, table=12))
    target: Any = NumpyTarget(b)
    drafter = load(tmp_path, b, target)
    meter, rounds = StatsMeter(), []
    for round_ in generate(Pair(target, drafter), PROMPT, max_tokens=1200):
        meter.add(round_)
        rounds.append(round_)
        if len(rounds) > 200:
            break
    text = ids(rounds)
    assert text == ids(generate(Pair(target), PROMPT, max_tokens=len(text)))
    assert len(set(text)) > 5, "a text that repeats itself proves little"
    assert 0.15 < meter.result().acceptance_rate < 0.95, "both ends of the accept rule must be met"


# Under the null hypothesis the excess passes 5 less than once in 10,000 runs (chi-square with 20 to
# 40 cells); keys are fixed, so a run that passes always passes.
@pytest.mark.parametrize("n_tokens", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_target(n_tokens: int, tmp_path: Path) -> None:
    b = taught(bundle(seed=3, table=12, flat=0.35))
    target: Any = NumpyTarget(b)
    drafter = load(tmp_path, b, target, bits=16)
    far, rate = excess(target, drafter, n_tokens)
    assert far < 5
    assert rate > 0.1, "too few accepted drafts to test anything"
