"""Forks of a block head draft and observe together what each of them does alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import FixedCap, Pair, Sampling, TargetOutput, generate
from spec_core.batch import Batch
from spec_core.protocols import DraftAsk, DraftsTogether, Observation, ObservesTogether
from spec_drafters import DFlash2Drafter, DFlashDrafter, DSparkDrafter, HybridDrafter, LookupDrafter
from spec_drafters._blocks import BlockBody

from .checkpoints import HIDDEN, VOCAB, TinyTarget, write
from .flash_layouts import FLASH2_LAYOUTS, FLASH_LAYOUTS
from .layouts import LAYOUTS


@pytest.fixture(params=[False, True], ids=["", "padded"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without what is done where each shape costs a start: drafts stay the same."""
    monkeypatch.setattr("spec_drafters._layers.plans_by_length", lambda: request.param)


FAMILIES: list[tuple[Any, Any]] = [
    *((DSparkDrafter, layout) for layout in LAYOUTS.values()),
    *((DFlashDrafter, layout) for layout in FLASH_LAYOUTS.values()),
]
NAMES = [*LAYOUTS, *FLASH_LAYOUTS]


def make(family: Any, layout: Any, folder: Path, **options: Any) -> Any:
    made = layout()
    write(folder, made.config, made.tensors if made.stored is None else made.stored)
    return family.load(folder, TinyTarget(), **{"bits": 16, **options})


def feed(drafter: Any, n_rows: int, rng: np.random.Generator) -> None:
    taps = [mx.array(rng.normal(size=(n_rows, HIDDEN)), mx.float32) for _ in drafter.taps]
    tokens = rng.integers(0, VOCAB, n_rows).tolist()
    drafter.observe(tokens, TargetOutput(mx.zeros((n_rows, 1)), tuple(taps)))


def asks_of(drafters: list[Any], anchors: list[int], caps: list[int]) -> list[DraftAsk]:
    key = mx.random.key(0)
    rows = zip(drafters, anchors, caps, strict=True)
    return [DraftAsk(drafter, anchor, cap, Sampling(), key) for drafter, anchor, cap in rows]


def check_same(asks: list[DraftAsk]) -> None:
    """The joint drafts are the lone ones, and leave them as they were."""
    lone = [ask.alone() for ask in asks]
    first = asks[0].drafter
    assert isinstance(first, DraftsTogether) and first.kin is not None
    assert all(ask.drafter.kin is first.kin for ask in asks)  # type: ignore[attr-defined]
    together = first.draft_together(asks)
    for one, other, again in zip(lone, together, [ask.alone() for ask in asks], strict=True):
        assert other is not None and other.tokens.dtype == one.tokens.dtype
        assert other.tokens.tolist() == one.tokens.tolist() == again.tokens.tolist()
        assert (other.probs, other.source) == (None, one.source)
        if one.confidence is None:
            assert other.confidence is None
        else:
            np.testing.assert_allclose(other.confidence, one.confidence, atol=1e-5)


def rounds(drafters: list[Any], rng: np.random.Generator, n: int = 3) -> None:
    """Joint drafts between observed rows; caps and the rows that are asked differ."""
    most = drafters[0].max_draft
    for i in range(n):
        some = drafters[i % 2 :]
        caps = [1 + (i + at) % (most + 2) for at in range(len(some))]
        caps = [most] * len(some) if i == 0 else caps
        check_same(asks_of(some, rng.integers(0, VOCAB, len(some)).tolist(), caps))
        for at, drafter in enumerate(drafters):
            feed(drafter, 1 + (at + i) % 4, rng)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(("family", "layout"), FAMILIES, ids=NAMES)
def test_forks_draft_together_what_they_draft_alone(
    family: Any, layout: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    drafter = make(family, layout, tmp_path)
    drafters = [drafter, *(drafter.fork() for _ in range(3))]
    for one, n_rows in zip(drafters[:3], (3, 5, 300), strict=True):  # the fourth has seen nothing
        feed(one, n_rows, rng)
    rounds(drafters, rng)
    short, state = drafters[2].shortened(drafters[2].state(), 300), drafters[0].state()
    drafters[1].restore(drafters[2].state() if short is None else short)
    drafters[3].reset()
    rounds(drafters, rng, 2)
    drafters[0].restore(state)
    rounds([*drafters, drafters[1].fork()], rng, 2)


def check_contexts(ones: list[Any], others: list[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one._body._caches, other._body._caches, strict=True):
            assert (a.n_rows, a.n_used) == (b.n_rows, b.n_used)
            for mine, theirs in zip(a.rows(), b.rows(), strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or mx.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(("family", "layout"), FAMILIES, ids=NAMES)
def test_forks_observe_together_what_they_observe_alone(
    family: Any, layout: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(8)
    drafter = make(family, layout, tmp_path, window=7)
    sets = [[drafter.fork() for _ in range(4)] for _ in range(2)]
    for n in range(9):
        shown: list[Any] = []
        for at, pair in enumerate(zip(*sets, strict=True)):
            if (at + n) % 4 == 0:  # not in this round
                continue
            size = (1, 3, 2, 9, 300)[(at + n) % 5]
            taps = [mx.array(rng.normal(size=(size, HIDDEN)), mx.float32) for _ in drafter.taps]
            output = TargetOutput(mx.zeros((size, 1)), tuple(taps))
            pair[0].observe([1] * size, output)
            shown.append(Observation(pair[1], [1] * size, output))
        assert isinstance(drafter, ObservesTogether)
        shown[0].drafter.observe_together(shown)
        if n % 3:
            check_contexts(*sets)
    ids = [[ask.alone().tokens.tolist() for ask in asks_of(one, [1, 2, 3, 4], [9] * 4)]
           for one in sets]  # fmt: skip
    assert ids[0] == ids[1]


def test_rows_that_do_not_fit_leave_every_context_as_it_was(tmp_path: Path) -> None:
    drafters = [make(DSparkDrafter, LAYOUTS["lfm2"], tmp_path)]
    drafters += [drafters[0].fork() for _ in range(2)]
    for drafter in drafters:
        feed(drafter, 5, np.random.default_rng(1))

    def output(width: int) -> TargetOutput:
        return TargetOutput(mx.zeros((2, 1)), tuple(mx.ones((2, width)) for _ in "ab"))

    widths = (HIDDEN, HIDDEN + 1, HIDDEN)
    shown = [
        Observation(one, [1, 2], output(width)) for one, width in zip(drafters, widths, strict=True)
    ]
    with pytest.raises(ValueError, match="concatenat"):
        drafters[0].observe_together(shown)
    assert [one._body.n_rows for one in drafters] == [5, 5, 5]


@pytest.mark.parametrize("window", [0, 4, 7])
@pytest.mark.parametrize("bits", [4, 16])
def test_windows_and_packed_weights_change_nothing(window: int, bits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for family, layout in (
        (DSparkDrafter, LAYOUTS["deepspec, recurrent markov"]),
        (DFlashDrafter, FLASH_LAYOUTS["z-lab"]),
    ):
        drafter = make(family, layout, tmp_path / family.name, window=window, bits=bits)
        drafters = [drafter, *(drafter.fork() for _ in range(7))]
        for one in drafters:
            feed(one, int(rng.integers(1, 20)), rng)
        rounds(drafters, rng, 5)


def test_one_draft_goes_through_the_joint_forward_too(tmp_path: Path) -> None:
    drafter = make(DSparkDrafter, LAYOUTS["qwen3.5 fork"], tmp_path)
    feed(drafter, 9, np.random.default_rng(0))
    check_same(asks_of([drafter], [4], [3]))


def test_what_cannot_go_together_says_so(tmp_path: Path) -> None:
    flash2 = make(DFlash2Drafter, FLASH2_LAYOUTS["dflash2"], tmp_path / "2")
    own_ends = LAYOUTS["deepspec, own ends"]
    reading = make(DSparkDrafter, own_ends, tmp_path / "t", confidence_threshold=0.3)
    other = make(DSparkDrafter, own_ends, tmp_path / "o")
    assert flash2.kin is None and reading.kin is None
    assert HybridDrafter(flash2).kin is None and HybridDrafter(LookupDrafter()).kin is None
    assert other.kin is other.fork().kin is not make(DSparkDrafter, own_ends, tmp_path / "o").kin
    hybrid = HybridDrafter(other)
    assert hybrid.kin is hybrid.fork().kin is not other.kin


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Contexts in each joint observation."""
    seen: list[int] = []
    plain = BlockBody.observe_together

    def counted(self: BlockBody, bodies: Any, taps: Any) -> None:
        seen.append(len(bodies))
        plain(self, bodies, taps)

    monkeypatch.setattr(BlockBody, "observe_together", counted)
    return seen


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks in each forward of a body."""
    seen: list[int] = []
    plain = BlockBody.hidden_together

    def counted(self: BlockBody, bodies: Any, anchors: Any, n_rows: int) -> mx.array:
        seen.append(len(bodies))
        return plain(self, bodies, anchors, n_rows)

    monkeypatch.setattr(BlockBody, "hidden_together", counted)
    return seen


def hybrids(folder: Path, n: int) -> list[HybridDrafter]:
    head = make(DSparkDrafter, LAYOUTS["deepspec, own ends"], folder)
    first = HybridDrafter(head, LookupDrafter(min_match=2))
    return [first, *(first.fork() for _ in range(n - 1))]


def test_hybrids_look_up_each_for_itself_and_the_rest_draft_together(
    tmp_path: Path, forwards: list[int]
) -> None:
    rng = np.random.default_rng(2)
    sets = hybrids(tmp_path, 4), hybrids(tmp_path, 4)
    sources: set[str] = set()

    def observe(texts: list[list[int]]) -> None:
        shown: list[Observation] = []
        for at, tokens in enumerate(texts):
            taps = [mx.array(rng.normal(size=(len(tokens), HIDDEN)), mx.float32) for _ in "ab"]
            output = TargetOutput(mx.zeros((len(tokens), 1)), tuple(taps))
            sets[1][at].observe(tokens, output)
            shown.append(Observation(sets[0][at], tokens, output))
        sets[0][0].observe_together(shown)

    observe([[1, 2, 3, 1, 2][: 2 + at] for at in range(4)])
    n_joint = []
    for n in range(60):
        anchors = rng.integers(0, 4, 4).tolist()
        asks, others = (asks_of(one, anchors, [1, 2, 3, 9]) for one in sets)
        lone = [ask.alone() for ask in others]
        forwards.clear()
        joint = sets[0][0].draft_together(asks)
        n_joint.append(list(forwards))
        if n % 5 == 0:  # as after a joint draft that was of no use
            joint = [ask.alone() for ask in asks]
        texts: list[list[int]] = []
        for at, (one, other) in enumerate(zip(lone, joint, strict=True)):
            assert other is not None and (other.source, other.tokens.tolist()) == (
                one.source, one.tokens.tolist(),
            )  # fmt: skip
            sources.add(one.source)
            kept = one.tokens.tolist()[: int(rng.integers(0, 3)) if one.source == "dspark" else 0]
            texts.append([anchors[at], *kept])
        observe(texts)
        for one, other in zip(*sets, strict=True):
            assert vars(one._rivalry) == vars(other._rivalry)
            assert one.state().lookup == other.state().lookup
    assert sources == {"lookup", "dspark"}
    assert all(len(one) <= 1 for one in n_joint)
    assert {n for one in n_joint for n in one} >= {3, 4}  # some looked up, or none of them


@dataclass
class Rows:
    singles: list[Any]
    is_open: bool = False


class TinyBatchTarget(TinyTarget):
    """A batch is a list of single caches."""

    batch_refusal = None

    def join(self, caches: Any) -> Rows:
        return Rows([c for p in caches for c in (p.singles if isinstance(p, Rows) else [p])])

    def select(self, cache: Rows, rows: Any) -> Rows:
        return Rows([cache.singles[row] for row in rows])

    def extract(self, cache: Rows, row: int) -> Any:
        return cache.singles[row]

    def verify_rows(self, blocks: mx.array, cache: Rows, *, taps: Any = ()) -> TargetOutput:
        outputs = [self.verify(b, c, taps=taps) for b, c in zip(blocks, cache.singles, strict=True)]
        cache.is_open = True
        tapped = [mx.stack(list(column)) for column in zip(*(o.taps for o in outputs), strict=True)]
        return TargetOutput(mx.stack([o.logits for o in outputs]), tuple(tapped))

    def commit_rows(self, cache: Rows, n_keep: Any) -> None:
        cache.is_open = False
        for single, n in zip(cache.singles, n_keep, strict=True):
            self.commit(single, n)


def request(seed: int) -> dict[str, Any]:
    samplings = [
        Sampling(),
        Sampling(temperature=0.9, top_k=20, seed=seed),
        Sampling(frequency_penalty=0.7),
        Sampling(temperature=1.2, min_p=0.05, repetition_penalty=1.3, seed=seed + 1),
    ]
    return {
        "max_tokens": 12 + 5 * (seed % 5),
        "sampling": samplings[seed % 4],
        "cap": FixedCap((4, 2, 3)[seed % 3]),
        "stop_ids": (seed % VOCAB,),
        "prefill_chunk": 8,
    }


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("family", "layout"),
    [(DSparkDrafter, LAYOUTS["lfm2"]), (DFlashDrafter, FLASH_LAYOUTS["z-lab"])],
    ids=["dspark", "dflash"],
)
def test_rows_of_a_mixed_batch_draft_together_and_equal_their_solo_runs(
    family: Any, layout: Any, hybrid: bool, tmp_path: Path, forwards: list[int], shown: list[int]
) -> None:
    target = TinyBatchTarget()
    drafter = make(family, layout, tmp_path)
    if hybrid:
        drafter = HybridDrafter(drafter, LookupDrafter(min_match=2))
    prompts = [[(5 * seed + i) % VOCAB for i in range(3 + 4 * (seed % 4))] for seed in range(10)]
    want, got, batch = {}, {}, Batch(target)
    for seed, prompt in enumerate(prompts):
        solo = list(generate(Pair(target, drafter.fork()), prompt, **request(seed)))
        want[seed] = [(r.tokens, r.n_drafted, r.n_accepted) for r in solo]
    forwards.clear()
    for seed, prompt in enumerate(prompts):
        batch.add(Pair(target, drafter.fork()), prompt, **request(seed), tag=seed)
        got[seed] = []
    while batch.rows:
        for row, outcome in batch.step():
            assert not isinstance(outcome, Exception), outcome
            got[row.tag].append((outcome.tokens, outcome.n_drafted, outcome.n_accepted))
            if outcome.finish_reason:
                batch.remove(row)
    assert got == want
    assert sum(n > 1 for n in forwards) > 5 and max(forwards) >= 3
    assert len(shown) > 5 and min(shown) > 1 and max(shown) >= 3
