"""A drafter whose numbers overflow: said once, parked, and the text stays the target's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError, Pair, Sampling, generate
from spec_core.testing import ToyTarget
from spec_drafters import (
    DFlash2Drafter,
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    HybridDrafter,
    load_drafter,
)

from .checkpoints import TinyTarget, write
from .flash_layouts import FLASH2_LAYOUTS, FLASH_LAYOUTS
from .layouts import LAYOUTS
from .test_eagle3 import DeepTarget, original

Made = tuple[Any, Any]  # target, drafter


def damaged(
    family: Any, layout: Any, weight: str, folder: Path, target: Any, **options: Any
) -> Made:
    tensors = dict(layout.tensors)
    assert weight in tensors
    tensors[weight] = np.array(tensors[weight], float)
    tensors[weight].flat[0] = np.inf
    write(folder, layout.config, tensors)
    return target, family.load(folder, target, bits=16, **options)


def dspark(
    weight: str, layout: str = "deepspec, own ends", **options: Any
) -> Callable[[Path], Made]:
    return lambda folder: damaged(
        DSparkDrafter, LAYOUTS[layout](), weight, folder, TinyTarget(), **options
    )


def in_front(folder: Path) -> Made:
    target, drafter = dspark("norm.weight")(folder)
    return target, HybridDrafter(drafter)


def draft_model(folder: Path) -> Made:
    small = ToyTarget(seed=5)
    small.table = small.table * mx.inf
    return ToyTarget(), DraftModelDrafter(small, ToyTarget())


DAMAGED: dict[str, Callable[[Path], Made]] = {
    "dspark, body": dspark("layers.0.mlp.down_proj.weight"),
    "dspark, markov": dspark("markov_head.markov_w2.weight"),
    "dspark, reduced vocabulary": dspark("norm.weight", "speculators, reduced"),
    "dspark, threshold": dspark("norm.weight", confidence_threshold=0.3),
    "dflash": lambda folder: damaged(
        DFlashDrafter, next(iter(FLASH_LAYOUTS.values()))(), "norm.weight", folder, TinyTarget()
    ),
    "dflash2": lambda folder: damaged(
        DFlash2Drafter, next(iter(FLASH2_LAYOUTS.values()))(), "norm.weight", folder, TinyTarget()
    ),
    "eagle3": lambda folder: damaged(
        Eagle3Drafter, original(), "norm.weight", folder, DeepTarget()
    ),
    "draft-model": draft_model,
    "hybrid": in_front,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_drafter_is_parked_with_one_remark(name: str, tmp_path: Path) -> None:
    target, drafter = DAMAGED[name](tmp_path)
    prompt = [1, 2, 3]
    plain = [t for r in generate(Pair(target), prompt, max_tokens=40) for t in r.tokens]
    with pytest.warns(RuntimeWarning, match="must compute numbers, got NaN") as remarks:
        rounds = list(generate(Pair(target, drafter), prompt, max_tokens=40))
    assert len(remarks) == 1
    assert f'Drafter "{drafter.name}"' in str(remarks[0].message)
    assert [t for r in rounds for t in r.tokens] == plain
    drafted = [r for r in rounds if r.n_drafted and r.source != "lookup"]
    assert len(drafted) == 1 and all(r.cap == 0 for r in rounds[rounds.index(drafted[0]) + 1 :])


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_drafter_is_parked_when_sampling_too(name: str, tmp_path: Path) -> None:
    target, drafter = DAMAGED[name](tmp_path)
    sampling = Sampling(temperature=1.0, seed=1)
    with pytest.warns(RuntimeWarning, match="must compute numbers, got NaN"):
        rounds = list(generate(Pair(target, drafter), [1, 2, 3], max_tokens=40, sampling=sampling))
    assert sum(len(r.tokens) for r in rounds) == 40
    assert sum(r.n_drafted > 0 and r.source != "lookup" for r in rounds) == 1


@pytest.mark.parametrize(
    ("family", "layout", "setting", "said"),
    [
        (LAYOUTS, "deepspec, own ends", {"mask_token_id": 10**9}, "one of the 40 tokens"),
        (FLASH_LAYOUTS, "keys on top", {"mask_token_id": 40}, "one of the 40 tokens"),
        (FLASH_LAYOUTS, "keys on top", {"mask_token_id": -1}, "one of the 40 tokens"),
        (LAYOUTS, "deepspec, own ends", {"target_layer_ids": [-1, 3]}, r"taps layers \(-1, 3\)"),
        (LAYOUTS, "deepspec, own ends", {"block_size": 10**6}, "must draft 1..1024 tokens a round"),
    ],
)
def test_settings_beyond_the_target_are_refused_before_they_are_used(
    family: Any, layout: str, setting: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made = family[layout]()
    write(tmp_path, made.config | setting, made.tensors)
    with pytest.raises(LoadError, match=said):
        load_drafter(tmp_path, TinyTarget())
