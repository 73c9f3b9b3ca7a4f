"""A whole V4.1 checkpoint on the real mlx-lm class: one folder is the target and its drafter."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from spec_core import Pair, StatsMeter, TargetOutput, generate, load_pair
from spec_drafters import DeepseekV4Drafter

from .checkpoints import TinyTarget
from .deepseek_layouts import (
    DRAFT_ACTIVE,
    DRAFT_EXPERTS,
    HIDDEN,
    N_STAGES,
    WINDOW,
    bundle,
    write_bundle,
)
from .deepseek_reference import taught
from .test_distribution import excess

spec_targets: Any = pytest.importorskip("spec_targets", reason="opens the model")

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


@pytest.fixture
def open_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a checkpoint and opens it twice: as target, and as what drafts for it."""
    tokenizer = SimpleNamespace(stop_ids=frozenset(), encode=None, decode=str)
    monkeypatch.setattr("spec_targets.load._load_tokenizer", lambda *_: tokenizer)

    def opened(mode: str = "dspark", **options: Any) -> Pair:
        b = bundle("v4.1", **options)
        b.config["text_config"]["hc_sinkhorn_iters"] = 2  # most of a tiny layer's time
        write_bundle(tmp_path, b)
        target, _ = spec_targets.load_target(tmp_path)
        write_bundle(tmp_path, taught(b, target))
        pair = load_pair(tmp_path, mode=mode)
        return Pair(pair.target, pair.drafter)

    return opened


def ids(rounds: Any) -> list[int]:
    return [token for round_ in rounds for token in round_.tokens]


def test_one_folder_gives_both_ends(open_pair: Any) -> None:
    pair = open_pair()
    target: Any = pair.target
    assert isinstance(pair.drafter, DeepseekV4Drafter)
    assert (target.model_type, target.tap_refusal) == ("deepseek_v41", None)
    attention = target.model.layers[0].self_attn
    assert attention.q_b_proj.mode == "mxfp8"  # nothing was unpacked on the way
    assert pair.drafter.report.missing == ("embed", "head")


@pytest.mark.parametrize("n_rounds", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_ids_equal_plain_decoding(open_pair: Any, n_rounds: int) -> None:
    pair = open_pair(seed=5, table=36)
    meter, rounds = StatsMeter(), []
    for round_ in generate(pair, PROMPT, max_tokens=1200):
        meter.add(round_)
        rounds.append(round_)
        if len(rounds) > n_rounds:
            break
    text = ids(rounds)
    plain = list(generate(Pair(pair.target), PROMPT, max_tokens=len(text)))
    assert text == ids(plain)
    assert len(set(text)) > 5, "a text that repeats itself proves little"
    assert 0.1 < meter.result().acceptance_rate < 0.95, "both ends of the accept rule must be met"


# Under the null hypothesis the excess passes 5 less than once in 10,000 runs (chi-square with 20 to
# 40 cells); keys are fixed, so a run that passes always passes.
@pytest.mark.parametrize("n_tokens", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_target(open_pair: Any, n_tokens: int) -> None:
    pair = open_pair(seed=5, table=36, flat=0.35)
    far, rate = excess(pair.target, pair.drafter, n_tokens)
    assert far < 5
    assert rate > 0.1, "too few accepted drafts to test anything"


def test_rejected_drafts_leave_no_trace_in_either_end(open_pair: Any) -> None:
    """After many rounds both ends say what fresh ones say of the same text."""
    pair = open_pair(seed=5, table=36)
    target, drafter = pair.target, pair.drafter
    text = [*PROMPT, *ids(generate(pair, PROMPT, max_tokens=60))]
    anchor, seen = text[-1], text[:-1]
    fresh = drafter.fork()
    output = target.prefill(seen, target.make_cache(), taps=drafter.taps)
    fresh.observe(seen, output)
    missing = len(seen) - drafter._body.n_rows
    assert 0 <= missing <= 6  # a round that the limit cut was not observed to its end
    if missing:
        cut = tuple(tap[-missing:] for tap in output.taps)
        drafter.observe(seen[-missing:], type(output)(output.logits, cut))
    rows = [one._body.hidden(anchor, 5) for one in (fresh, drafter)]
    assert mx.abs(rows[0] - rows[1]).max().item() < 1e-3 * mx.abs(rows[0]).max().item()


def test_a_block_of_one_row_equals_the_librarys_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's V4.1 layer on the drafter's context: a stage differs from it in its mask alone."""
    library: Any = importlib.import_module("mlx_lm.models.deepseek_v41")
    monkeypatch.setattr(library, "_fake_quant_fp8", lambda x, _: x)  # drafts keep keys as they are
    b = bundle("v4.1", packed=False)
    text = b.config["text_config"]
    text |= {"dspark_block_size": 1}
    write_bundle(tmp_path, b)
    target = TinyTarget()
    drafter = DeepseekV4Drafter.load(tmp_path, target, bits=16)
    n_rows = WINDOW + 5
    taps = mx.random.normal((n_rows, HIDDEN), key=mx.random.key(0))
    drafter.observe([0] * n_rows, TargetOutput(mx.zeros((n_rows, 1)), (taps, -taps, taps**2)))
    body: Any = drafter._body

    own = {"compress_ratios": [], "kv_source_layer_ids": [], "index_source_layer_ids": []}
    sizes = {"n_routed_experts": DRAFT_EXPERTS, "num_experts_per_tok": DRAFT_ACTIVE}
    config = {**text, **own, **sizes, "num_hidden_layers": N_STAGES, "rope_scaling": None}
    model = library.Model(library.ModelArgs.from_dict({**config, "model_type": "deepseek_v41"}))
    stored = {k.replace("mtp.", "layers."): mx.array(v) for k, v in b.values.items() if "mtp." in k}
    model.load_weights(list(model.sanitize(stored).items()), strict=False)

    row = target.embed(mx.array([7]))
    stream = mx.broadcast_to(row[None, :, None], (1, 1, 4, HIDDEN))
    pre = mx.array([[[1.0, 0, 0, 0]]])
    for layer, cache in zip(model.layers, body._caches, strict=True):
        held = library.LayerCache(WINDOW)
        held.window = cache.rows()[0][0]
        places = mx.arange(WINDOW + 1)[None, None]  # all context rows, and its own
        settings = {"start_pos": n_rows, "window_idx": places, "cache": held, "shared": {}}
        stream, pre = layer(stream, pre, **settings)
    want = library._collapse(stream, pre)[0]
    got = body.hidden(7, 1)
    assert mx.abs(got - want).max().item() < 1e-5 * mx.abs(want).max().item()
