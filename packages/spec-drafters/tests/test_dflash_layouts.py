"""DFlash and DFlash 2 in each packaging against the NumPy forward; mistakes would be noticed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_core import Sampling
from spec_core.testing import check_drafter
from spec_drafters import DFlash2Drafter, DFlashDrafter

from .checkpoints import HIDDEN, VOCAB, TinyTarget, write
from .flash_layouts import FLASH2_LAYOUTS, FLASH_LAYOUTS, WINDOW
from .layouts import Layout
from .parity import Session
from .reference import Spec, causal_view, full_view, window_view

ALL = FLASH_LAYOUTS | FLASH2_LAYOUTS


def open_layout(folder: Path, name: str, **options: Any) -> tuple[Any, Session, Layout]:
    layout = ALL[name]()
    target = TinyTarget()
    stored = layout.tensors if layout.stored is None else layout.stored
    write(folder, layout.config, stored)
    family = DFlash2Drafter if name in FLASH2_LAYOUTS else DFlashDrafter
    drafter = family.load(folder, target, bits=16, **options)
    return drafter, Session(drafter, target, layout.tensors), layout


@pytest.mark.parametrize("name", ALL)
def test_equals_the_reference_over_several_rounds(name: str, tmp_path: Path) -> None:
    drafter, session, layout = open_layout(tmp_path, name)
    assert drafter.head.packaging == layout.packaging
    assert drafter.taps == (1, 3)
    assert drafter.max_draft == layout.spec.block - 1
    session.observe(7)
    session.observe(3)
    session.check(layout.spec)


@pytest.mark.parametrize("name", ALL)
def test_keeps_the_contract(name: str, tmp_path: Path) -> None:
    drafter, _, _ = open_layout(tmp_path, name)
    check_drafter(drafter, vocab_size=VOCAB, hidden_size=HIDDEN)


@pytest.mark.parametrize("name", ALL)
def test_a_smaller_cap_gives_the_first_drafts_of_the_whole_block(name: str, tmp_path: Path) -> None:
    drafter, session, _ = open_layout(tmp_path, name)
    session.observe(9)
    whole = session.draft(5, Sampling()).tokens.tolist()
    for cap in range(1, drafter.max_draft):
        assert session.draft(5, Sampling(), cap=cap).tokens.tolist() == whole[:cap]


MISTAKES = {
    "the anchor's row predicts": ("z-lab", {"start": 0}),
    "stale block size": ("keys nested", {"block": 16}),
    "a sliding layer run both ways": (
        "sliding, then full",
        {"views": (window_view(WINDOW, causal=False), full_view)},
    ),
    "is_causal false ignored": (
        "sliding both ways",
        {"views": (window_view(WINDOW, causal=True),) * 2},
    ),
    "dflash2, is_causal false ignored": (
        "dflash2",
        {"views": (window_view(WINDOW, causal=True),) * 2},
    ),
    "is_causal true ignored": ("full and causal", {"views": (full_view,) * 2}),
    "window ignored": ("sliding, then full", {"views": (causal_view, full_view)}),
    "norms shifted": ("z-lab", {"norm_shift": 1.0}),
    "multiplier ignored": ("output transform", {"multiplier": 1.0}),
    "softcap ignored": ("output transform", {"softcap": None}),
    "embedding scale ignored": ("output transform", {"embed_scale": 1.0}),
    "convolutions left out": ("dflash2", {"conv_group": None}),
    "convolutions made from the sublayer's output": ("dflash2", {"conv_from_output": True}),
    "best of V, not of the candidates": ("dflash2", {"top_k": VOCAB}),
    "selector left out": ("dflash2", {"top_k": None}),
    "selector fed raw logits": ("dflash2, output transform", {"softcap": None, "multiplier": 1.0}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str, tmp_path: Path) -> None:
    name, changes = MISTAKES[mistake]
    _, session, layout = open_layout(tmp_path, name)
    session.observe(12)
    assert session.distance(layout.spec, 11) < 1e-4
    assert far(session, replace(layout.spec, **changes))


def far(session: Session, spec: Spec) -> bool:
    """True when the reference, misread like this, differs from what the drafter computed."""
    return session.distance(spec, 11) > 1e-2


def test_the_selector_starts_from_the_anchor_not_from_the_mask(tmp_path: Path) -> None:
    _, session, layout = open_layout(tmp_path, "dflash2")
    session.observe(9)
    table = session.w["candidate_selector.predecessor_codebook"].copy()
    table[11] = table[layout.spec.mask_id]
    session.w = session.w | {"candidate_selector.predecessor_codebook": table}
    assert far(session, layout.spec)


def test_the_selector_reads_normed_rows(tmp_path: Path) -> None:
    _, session, layout = open_layout(tmp_path, "dflash2")
    session.observe(9)
    scaled = session.w["candidate_selector.hidden_projection.weight"] / session.w["norm.weight"]
    session.w = session.w | {"candidate_selector.hidden_projection.weight": scaled}
    assert far(session, layout.spec)


def test_convolutions_never_touch_context_rows(tmp_path: Path) -> None:
    """Row 0 of a block has no row before it: the newest context row is not its neighbour."""
    _, session, layout = open_layout(tmp_path, "dflash2")
    session.observe(9)
    assert session.distance(layout.spec, 11) < 1e-4  # the reference starts from zeros


def test_rejected_rows_are_no_context(tmp_path: Path) -> None:
    _, session, layout = open_layout(tmp_path, "z-lab")
    session.observe(9)
    session.draft(11, Sampling())
    assert session.distance(layout.spec, 11) < 1e-4
    extra = session.rng.normal(size=(1, session.taps.shape[1]))
    session.taps = np.concatenate([session.taps, extra])
    assert far(session, layout.spec)


def test_sampling_temperature_is_applied_once(tmp_path: Path) -> None:
    _, session, layout = open_layout(tmp_path, "z-lab")
    session.observe(9)
    session.check_sampled(layout.spec, 11, 0)  # the comparison is at temperature 0.7
    halved = replace(layout.spec, multiplier=0.7)
    assert far(session, halved)


def test_a_target_that_scales_its_embeddings_says_so(tmp_path: Path) -> None:
    _, session, layout = open_layout(tmp_path, "z-lab", embed_scale=5.65625)
    session.observe(9)
    assert session.distance(replace(layout.spec, embed_scale=5.65625), 11) < 1e-4
    assert far(session, layout.spec)
