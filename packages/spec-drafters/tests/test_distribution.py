"""Sampled text follows the target's distribution, whatever drafts: chi-square over a long run.

Every emitted token is compared with the target's exact distribution after its own history. Tokens
are binned by their place in the round and their rank in the draft's distribution there; both are
settled before the token is, so the counts of a bin must be near its summed probabilities.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Draft, Pair, Sampling, Target, generate, target_probs
from spec_drafters import (
    DFlash2Drafter,
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    HybridDrafter,
)

from .checkpoints import VOCAB, TinyTarget, write
from .flash_layouts import FLASH_LAYOUTS, flash2
from .layouts import LAYOUTS
from .test_eagle3 import LAYOUTS as EAGLE_LAYOUTS

PROMPT = [3, 1, 4, 1, 5]
SETTINGS = Sampling(temperature=1.6, top_p=0.97, top_k=30, seed=5)


class FlatTarget(TinyTarget):
    """A target that is unsure, so that random heads are accepted often enough to test that path."""

    n_layers = 8

    def __init__(self) -> None:
        super().__init__()
        self.table = self.table * 0.4
        self._head = self._head * 0.15


# Factors that make the heads' distributions as flat as the target's.
_MILD = {
    "lm_head.weight": 0.25,
    "markov_head.markov_w2.weight": 0.25,
    "candidate_selector.successor_codebook": 0.3,
}


def head(folder: Path, family: Any, layout: Any, **options: Any) -> Any:
    stored = getattr(layout, "stored", None)
    keys = {k: v for k, v in layout.config.items() if k != "num_target_layers"}
    if "dflash_config" in keys:
        keys["dflash_config"] = {
            k: v for k, v in keys["dflash_config"].items() if k != "num_target_layers"
        }
    tensors = layout.tensors if stored is None else stored
    scaled = {k: v * _MILD.get(k, 1.0) for k, v in tensors.items()}
    write(folder, keys, scaled)
    return family.load(folder, FlatTarget(), bits=16, **options)


def twin() -> FlatTarget:
    """A small model that resembles the target."""
    model = FlatTarget()
    noise = mx.random.normal(model.table.shape, key=mx.random.key(8))
    model.table = model.table + 0.7 * noise
    return model


MAKERS: dict[str, Callable[[Path], Any]] = {
    "dspark": lambda p: head(p, DSparkDrafter, LAYOUTS["deepspec, own ends"]()),
    "dspark, reduced vocabulary": lambda p: head(
        p, DSparkDrafter, LAYOUTS["speculators, reduced"]()
    ),
    "dspark, temperature alone": lambda p: head(
        p, DSparkDrafter, LAYOUTS["deepspec, recurrent markov"](), truncate=False
    ),
    "dspark, cut by confidence": lambda p: head(
        p, DSparkDrafter, LAYOUTS["deepspec, own ends"](), confidence_threshold=0.3
    ),
    "dflash": lambda p: head(p, DFlashDrafter, FLASH_LAYOUTS["z-lab"]()),
    "dflash, reduced vocabulary": lambda p: head(
        p, DFlashDrafter, FLASH_LAYOUTS["speculators, reduced"]()
    ),
    "dflash2": lambda p: head(p, DFlash2Drafter, flash2(selector_top_k=24)),
    "eagle3, reduced vocabulary": lambda p: head(p, Eagle3Drafter, EAGLE_LAYOUTS["original"]()),
    "draft-model": lambda p: DraftModelDrafter(twin(), FlatTarget()),
    "hybrid": lambda p: HybridDrafter(head(p, DSparkDrafter, LAYOUTS["deepspec, own ends"]())),
}


class Recording:
    """Passes everything on and keeps the drafts."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.name, self.taps, self.max_draft = drafter.name, drafter.taps, drafter.max_draft
        self.observe, self.reset = drafter.observe, drafter.reset
        self.state, self.restore = drafter.state, drafter.restore
        self.drafts: list[Draft] = []

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        self.drafts.append(self._drafter.draft(anchor, cap, sampling=sampling, key=key))
        return self.drafts[-1]


def draft_ranks(draft: Draft | None, place: int, row: np.ndarray) -> np.ndarray:
    """Tokens by draft probability at a place of the round, or by the target's without a draft."""
    if draft is None or place >= draft.n_drafted:
        return np.argsort(-row, kind="stable")
    if draft.probs is not None:
        return np.argsort(-np.array(draft.probs[place]), kind="stable")
    drafted = int(draft.tokens[place].item())
    return np.argsort(-(row + 2 * (np.arange(VOCAB) == drafted)), kind="stable")


def excess(target: Target, drafter: Any, n_tokens: int) -> tuple[float, float]:
    """How far chi-square lies above its mean, in standard deviations; and the acceptance rate."""
    recording = Recording(drafter)
    pair = Pair(target, recording)
    rounds = list(generate(pair, PROMPT, max_tokens=n_tokens, sampling=SETTINGS))
    drafts = iter(recording.drafts)
    made = [next(drafts) if r.cap else None for r in rounds]
    places = [(d, i) for r, d in zip(rounds, made, strict=True) for i in range(len(r.tokens))]
    text = [*PROMPT, *(t for r in rounds for t in r.tokens)]
    start = len(PROMPT)
    logits = target.verify(mx.array(text[:-1], mx.int32), target.make_cache()).logits
    rows = target_probs(logits[start - 1 :], SETTINGS)
    seen: dict[tuple[int, int], float] = defaultdict(float)
    expected: dict[tuple[int, int], float] = defaultdict(float)
    for (draft, place), token, row in zip(
        places, text[start:], np.array(rows).astype(np.float64), strict=True
    ):
        assert row[token] > 0, "a token outside top-k or top-p"
        for rank, other in enumerate(draft_ranks(draft, place, row)):
            key = (min(place, 2), min(rank, 12))
            expected[key] += row[other]
            seen[key] += other == token
    cells = [(seen[k], e) for k, e in expected.items() if e >= 5]
    chi_square = sum((s - e) ** 2 / e for s, e in cells)
    n_drafted = sum(r.n_drafted for r in rounds)
    rate = sum(r.n_accepted for r in rounds) / max(n_drafted, 1)
    return (chi_square - len(cells)) / (2 * len(cells)) ** 0.5, rate


# Under the null hypothesis the excess passes 5 less than once in 10,000 runs (chi-square with 20 to
# 40 cells); keys are fixed, so a run that passes always passes.
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("n_tokens", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_tokens_follow_the_target(name: str, n_tokens: int, tmp_path: Path) -> None:
    far, rate = excess(FlatTarget(), MAKERS[name](tmp_path), n_tokens)
    assert far < 5
    assert rate > 0.1, "too few accepted drafts to test anything"


class Misreporting(Recording):
    """Draws colder than it says."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        cold = replace(sampling, temperature=sampling.temperature / 3, top_p=1.0, top_k=0)
        draft = self._drafter.draft(anchor, cap, sampling=cold, key=key)
        warm = draft.probs ** (1 / 3)
        return replace(draft, probs=warm / warm.sum(axis=-1, keepdims=True))


@pytest.mark.slow
def test_wrongly_reported_probabilities_are_found_out(tmp_path: Path) -> None:
    wrong = Misreporting(MAKERS["dspark"](tmp_path))
    assert excess(FlatTarget(), wrong, 2000)[0] > 5


@pytest.mark.parametrize("name", MAKERS)
def test_every_slot_is_drawn_from_its_own_row(name: str, tmp_path: Path) -> None:
    """Also where a row depends on the token drawn before it."""
    drafter = MAKERS[name](tmp_path)
    target = FlatTarget()
    output = target.prefill(PROMPT, target.make_cache(), taps=drafter.taps)
    drafter.observe(PROMPT, output)
    settings = Sampling(temperature=2.5)
    seen: dict[tuple[int, int], float] = defaultdict(float)
    expected: dict[tuple[int, int], float] = defaultdict(float)
    for n in range(120):
        draft = drafter.draft(9, 3, sampling=settings, key=mx.random.key(n))
        if draft.probs is None:
            pytest.skip("copied drafts have no distribution")
        tokens: list[int] = draft.tokens.tolist()
        for slot, (token, row) in enumerate(zip(tokens, np.array(draft.probs), strict=True)):
            for rank, other in enumerate(np.argsort(-row, kind="stable")):
                key = (slot, min(rank, 9))
                expected[key] += float(row[other])
                seen[key] += other == token
    cells = [(seen[k], e) for k, e in expected.items() if e >= 5]
    chi_square = sum((s - e) ** 2 / e for s, e in cells)
    assert (chi_square - len(cells)) / (2 * len(cells)) ** 0.5 < 5
