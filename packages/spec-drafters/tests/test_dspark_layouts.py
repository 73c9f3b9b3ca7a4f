"""Each packaging loads, drafts and equals the plain NumPy forward; mistakes would be noticed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Sampling
from spec_core.testing import check_drafter
from spec_drafters import DSparkDrafter

from .checkpoints import HIDDEN, VOCAB, TinyTarget, write
from .layouts import LAYOUTS, Layout
from .parity import Session
from .reference import Spec, causal_view, full_view, window_view


def open_layout(folder: Path, layout: Layout, **options: Any) -> tuple[DSparkDrafter, Session]:
    target = TinyTarget()
    stored = layout.tensors if layout.stored is None else layout.stored
    write(folder, layout.config, stored, n_shards=layout.n_shards)
    drafter = DSparkDrafter.load(folder, target, bits=16, **options)
    return drafter, Session(drafter, target, layout.tensors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_reference_over_several_rounds(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    drafter, session = open_layout(tmp_path, layout)
    assert drafter.head.packaging == layout.packaging
    assert drafter.max_draft == layout.spec.block - layout.spec.start
    session.observe(7)
    session.observe(3)
    session.check(layout.spec)


@pytest.mark.parametrize("name", LAYOUTS)
def test_keeps_the_contract(name: str, tmp_path: Path) -> None:
    drafter, _ = open_layout(tmp_path, LAYOUTS[name]())
    check_drafter(drafter, vocab_size=VOCAB, hidden_size=HIDDEN)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_smaller_cap_gives_the_first_drafts_of_the_whole_block(name: str, tmp_path: Path) -> None:
    drafter, session = open_layout(tmp_path, LAYOUTS[name]())
    session.observe(9)
    whole = session.draft(5, Sampling()).tokens.tolist()
    for cap in range(1, drafter.max_draft):
        assert session.draft(5, Sampling(), cap=cap).tokens.tolist() == whole[:cap]


MISTAKES = {
    "the wrong slot": ("deepspec, own ends", {"start": 1}),
    "the anchor predicts": ("speculators, anchor dropped", {"start": 0}),
    "norms not shifted": ("qwen3.5 fork", {"norm_shift": 0.0}),
    "norms shifted": ("deepspec, own ends", {"norm_shift": 1.0}),
    "half-split for interleaved": ("lfm2", {"interleaved": False}),
    "interleaved for half-split": ("deepspec, own ends", {"interleaved": True}),
    "partial rotation from noise": ("deepspec, inherited noise", {"rope_dims": 4}),
    "full rotation in the fork": ("qwen3.5 fork", {"rope_dims": 16}),
    "yarn frequencies ignored": ("specforge", {"frequencies": None, "theta": 1e4}),
    "yarn gain ignored": ("specforge", {"rope_gain": 1.0}),
    "causal run both ways": ("nemotron", {"views": (full_view,) * 2}),
    "window ignored": ("nemotron", {"views": (causal_view,) * 2}),
    "window off by one": ("nemotron", {"views": (window_view(7, causal=True),) * 2}),
    "both ways run causally": ("deepspec, own ends", {"views": (causal_view,) * 2}),
    "sliding layer run causally": (
        "speculators, window both ways",
        {"views": (window_view(6, causal=True), full_view)},
    ),
    "sinks ignored": ("nemotron", {"sinks": False}),
    "softcap on a borrowed head": ("gemma4, borrowed ends", {"softcap": 4.0}),
    "softcap of an own head ignored": ("gemma4, own ends", {"softcap": None}),
    "embeddings not scaled": ("gemma4, own ends", {"embed_scale": 1.0}),
    "log-SNR ends swapped": ("bonsai", {"anchor_is_noise": True}),
    "log-SNR ignored": ("bonsai", {"snr": None}),
    "another mask token": ("deepspec, own ends", {"mask_id": 4}),
    "another theta": ("deepspec, own ends", {"theta": 1e4}),
    "markov left out": ("deepspec, own ends", {"markov": None}),
    "a narrower block": ("deepspec, own ends", {"block": 4}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str, tmp_path: Path) -> None:
    name, changes = MISTAKES[mistake]
    layout = LAYOUTS[name]()
    _, session = open_layout(tmp_path, layout)
    session.observe(12)
    assert session.distance(layout.spec, 11) < 1e-4
    assert session.distance(replace(layout.spec, **changes), 11) > 1e-2


def distance_with(session: Session, spec: Spec, **changes: np.ndarray) -> float:
    """Distance after a change of the reference's tensors or taps."""
    for name, value in changes.items():
        if name == "taps":
            session.taps = value
        else:
            session.w = session.w | {name: value}
    return session.distance(spec, 11)


def test_notices_late_taps(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators, anchor dropped"]()
    drafter, _ = open_layout(tmp_path, layout)
    assert drafter.taps == (1, 3)  # the file says 2 and 4: states entering those layers


def test_notices_a_per_layer_norm_on_the_context(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    _, session = open_layout(tmp_path, layout)
    session.observe(8)
    doubled = session.w["hidden_norm.weight"] * session.w["layers.0.input_layernorm.weight"]
    assert distance_with(session, layout.spec, **{"hidden_norm.weight": doubled}) > 1e-2


def test_notices_positions_counted_from_the_window(tmp_path: Path) -> None:
    """Context rows keep their absolute positions when old rows fall out of the window."""
    layout = LAYOUTS["nemotron"]()
    _, session = open_layout(tmp_path, layout)
    session.observe(20)
    assert session.distance(layout.spec, 11) < 1e-4
    # Rotation is relative: moving all rows alike changes nothing, moving the context alone does.
    session.taps = session.taps[1:]
    assert session.distance(layout.spec, 11) < 1e-4
    session.taps = np.concatenate([session.taps[:10], session.taps[11:], session.taps[-1:]])
    assert session.distance(layout.spec, 11) > 1e-2


def test_notices_an_extra_context_row(tmp_path: Path) -> None:
    """The anchor's own row is no context, and rejected rows are not either."""
    layout = LAYOUTS["deepspec, own ends"]()
    _, session = open_layout(tmp_path, layout)
    session.observe(8)
    session.draft(4, Sampling())
    longer = np.concatenate([session.taps, session.rng.normal(size=(1, session.taps.shape[1]))])
    assert session.distance(layout.spec, 11) < 1e-4
    assert distance_with(session, layout.spec, taps=longer) > 1e-2


def test_notices_absolute_ids_in_d2t(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators, reduced"]()
    drafter, session = open_layout(tmp_path, layout)
    session.observe(8)
    tokens = set()
    for seed in range(30):
        tokens |= set(session.draft(11, Sampling(temperature=2.0), seed).tokens.tolist())
    allowed = set((np.arange(24) + layout.tensors["d2t"]).tolist())
    assert tokens <= allowed and not tokens <= set(layout.tensors["d2t"].tolist())


def test_notices_w1_indexed_with_draft_ids(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators, reduced"]()
    _, session = open_layout(tmp_path, layout)
    session.observe(8)
    shuffled = session.w["markov_head.markov_w1.weight"].copy()
    offsets = layout.tensors["d2t"]
    for draft_id in range(24):
        shuffled[draft_id + offsets[draft_id]] = layout.tensors["markov_head.markov_w1.weight"][
            draft_id
        ]
    assert distance_with(session, layout.spec, **{"markov_head.markov_w1.weight": shuffled}) > 1e-2


def test_the_draft_window_keeps_the_newest_rows_at_their_positions(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    _, session = open_layout(tmp_path, layout, window=8)
    session.observe(5)
    session.observe(30)

    def newest(query: int, key: int, start: int) -> bool:
        return key >= start - 8

    session.check(replace(layout.spec, views=(newest, newest)))


def test_a_threshold_cuts_before_the_first_unsure_slot(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    drafter, session = open_layout(tmp_path, layout)
    session.observe(8)
    confidence: list[float] = session.draft(11, Sampling()).confidence.tolist()  # type: ignore
    snapshot = drafter.state()
    threshold = sorted(confidence)[2]
    want = next(i for i, c in enumerate(confidence) if c < threshold)
    cutting = DSparkDrafter.load(tmp_path, TinyTarget(), bits=16, confidence_threshold=threshold)
    cutting.restore(snapshot)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        draft = cutting.draft(11, 5, sampling=sampling, key=mx.random.key(0))
        if sampling.greedy:
            assert draft.n_drafted == want
        assert draft.confidence is not None and draft.confidence.shape == draft.tokens.shape
        assert draft.probs is None or draft.probs.shape == (draft.n_drafted, VOCAB)
