"""What a round may cost: no device read in a draft, no copy of the context, no growing graph."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import Pair, Sampling, TargetOutput, generate
from spec_core import loop as loop_module
from spec_drafters import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from spec_drafters import _chain as chain_module

from .checkpoints import HIDDEN, TinyTarget, write
from .flash_layouts import FLASH_LAYOUTS
from .layouts import LAYOUTS
from .test_eagle3 import LAYOUTS as EAGLE_LAYOUTS
from .test_eagle3 import DeepTarget

HEADS: dict[str, Any] = {
    "dspark": (DSparkDrafter, LAYOUTS["deepspec, own ends"], TinyTarget),
    "dspark, window": (DSparkDrafter, LAYOUTS["nemotron"], TinyTarget),
    "dflash": (DFlashDrafter, FLASH_LAYOUTS["z-lab"], TinyTarget),
    "eagle3": (Eagle3Drafter, EAGLE_LAYOUTS["original"], DeepTarget),
}


def make(name: str, folder: Path, **options: Any) -> Any:
    family, layout, target = HEADS[name]
    made = layout()
    write(folder, made.config, made.tensors)
    return family.load(folder, target(), bits=16, **options)


def feed(drafter: Any, n_rows: int) -> None:
    taps = tuple(mx.ones((n_rows, HIDDEN)) for _ in drafter.taps)
    drafter.observe([1] * n_rows, TargetOutput(mx.zeros((n_rows, 1)), taps))


def draft(drafter: Any, cap: int = 3) -> Any:
    return drafter.draft(2, cap, sampling=Sampling(), key=mx.random.key(0))


def caches(drafter: Any) -> list[Any]:
    return drafter._body._caches if hasattr(drafter, "_body") else [drafter._context]


def addresses(drafter: Any) -> list[int]:
    """Where the context's buffers lie in memory."""
    arrays = [a for cache in caches(drafter) for a in cache.arrays]
    return [np.asarray(a).ctypes.data for a in arrays]


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="buffers have addresses on the CPU")
@pytest.mark.parametrize("name", HEADS)
def test_rounds_write_the_context_in_place(name: str, tmp_path: Path) -> None:
    drafter = make(name, tmp_path)
    feed(drafter, 200)
    mx.eval(draft(drafter).tokens)
    before = addresses(drafter)
    for n in range(12):
        feed(drafter, 1 + n % 4)  # the loop has read the round before by now
        mx.async_eval(draft(drafter).tokens)
        mx.synchronize()
    for _ in range(10):  # plain steps
        feed(drafter, 1)
        mx.synchronize()
    mx.eval(draft(drafter).tokens)
    assert addresses(drafter) == before


@pytest.mark.parametrize("name", HEADS)
def test_a_draft_evaluates_nothing(name: str, tmp_path: Path) -> None:
    options = {} if name == "eagle3" else {"window": 0}
    drafter = make(name, tmp_path, **options)
    for _ in range(8):
        feed(drafter, 500)
    mx.eval(draft(drafter).tokens)
    mx.synchronize()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    result = draft(drafter)
    lazily = mx.get_peak_memory() - held
    mx.eval(result.tokens)
    assert lazily < 4_000 < mx.get_peak_memory() - held


@pytest.mark.parametrize("name", HEADS)
def test_a_round_reads_the_device_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(name, tmp_path)
    target = DeepTarget() if name == "eagle3" else TinyTarget()
    reads: list[int] = []
    plain = loop_module.host_ints

    def counted(array: mx.array) -> list[int]:
        reads.append(1)
        return plain(array)

    def refused(array: mx.array) -> int:
        raise AssertionError("the drafter read the device")

    monkeypatch.setattr(loop_module, "host_ints", counted)
    monkeypatch.setattr(chain_module, "host_int", refused)
    rounds = list(generate(Pair(target, drafter), [1, 2, 3], max_tokens=20))
    assert len(reads) == len(rounds)


def test_a_confidence_threshold_reads_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make("dspark", tmp_path, confidence_threshold=0.2)
    reads: list[int] = []
    plain = chain_module.host_int

    def counted(array: mx.array) -> int:
        reads.append(1)
        return plain(array)

    monkeypatch.setattr(chain_module, "host_int", counted)
    feed(drafter, 5)
    draft(drafter)
    assert len(reads) == 1


@pytest.mark.parametrize("name", HEADS)
def test_plain_steps_leave_no_growing_graph(name: str, tmp_path: Path) -> None:
    """Memory after 400 observed rows without a draft is the context's alone."""
    drafter = make(name, tmp_path)
    feed(drafter, 600)
    feed(drafter, 1)  # the buffers double and have room for all that follows
    mx.eval(draft(drafter).tokens)
    held = mx.get_active_memory()
    for _ in range(400):
        feed(drafter, 1)
    mx.synchronize()
    # A row of taps, its projections and keys would be kept 400 times over.
    assert mx.get_active_memory() - held < 60_000
