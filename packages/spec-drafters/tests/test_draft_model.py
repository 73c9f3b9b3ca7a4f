"""A target as drafter of another: greedy chains, rollback without trace, vocabularies."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from spec_core import LoadError, Pair, Sampling, TargetOutput, generate, target_probs
from spec_core.testing import ToyCache, ToyTarget, check_drafter
from spec_drafters import DraftModelDrafter
from spec_drafters._vocabulary import check_same_vocabulary, read_vocabulary

NOTHING = TargetOutput(mx.zeros((0, 1)))
KEY = mx.random.key(0)


def drafter(seed: int = 5, **options: int) -> DraftModelDrafter:
    return DraftModelDrafter(ToyTarget(seed=seed), ToyTarget(), **options)


def chain(model: ToyTarget, committed: list[int], anchor: int, n: int) -> list[int]:
    """What plain greedy decoding of the small model gives."""
    rounds = generate(Pair(model), [*committed, anchor], max_tokens=n)
    return [token for r in rounds for token in r.tokens]


def test_keeps_the_contract() -> None:
    check_drafter(drafter(), vocab_size=12)


def test_drafts_are_the_small_models_own_decoding_round_after_round() -> None:
    made, committed = drafter(max_draft=5), [1, 5, 2, 7]
    made.observe(committed, NOTHING)
    for n in range(6):
        anchor = (3 * n) % 12
        tokens = made.draft(anchor, 5, sampling=Sampling(), key=KEY).tokens.tolist()
        assert tokens == chain(ToyTarget(seed=5), committed, anchor, 5)
        kept = [anchor, *tokens[: n % 4]]  # type: ignore[misc]
        made.observe(kept, NOTHING)
        committed += kept


def test_a_long_prompt_is_taken_in_chunks() -> None:
    made, committed = drafter(), [(7 * i) % 12 for i in range(1300)]
    made.observe(committed[:900], NOTHING)
    made.observe(committed[900:], NOTHING)
    tokens = made.draft(3, 4, sampling=Sampling(), key=KEY).tokens.tolist()
    assert tokens == chain(ToyTarget(seed=5), committed, 3, 4)


def test_probs_are_the_small_models_distributions() -> None:
    made = drafter()
    made.observe([1, 2], NOTHING)
    settings = Sampling(temperature=0.6, top_p=0.9)
    draft = made.draft(4, 3, sampling=settings, key=KEY)
    assert draft.probs is not None
    tokens: list[int] = draft.tokens.tolist()  # type: ignore[assignment]
    model = ToyTarget(seed=5)
    cache = model.make_cache()
    rows = model.verify(mx.array([1, 2, 4, *tokens[:2]], mx.int32), cache).logits[2:]
    assert mx.allclose(draft.probs, target_probs(rows, settings), atol=1e-6)


def test_greedy_output_is_the_targets_and_a_twin_is_always_accepted() -> None:
    target = ToyTarget()
    plain = [t for r in generate(Pair(target), [1, 2], max_tokens=30) for t in r.tokens]
    for seed, share in ((0, 1.0), (5, 0.0)):
        pair = Pair(target, DraftModelDrafter(ToyTarget(seed=seed), target))
        rounds = list(generate(pair, [1, 2], max_tokens=30))
        assert [t for r in rounds for t in r.tokens] == plain
        n_drafted = sum(r.n_drafted for r in rounds)
        accepted = sum(r.n_accepted for r in rounds) / n_drafted
        assert accepted == 1.0 if share else accepted < 0.9


def test_restoring_a_longer_sequence_keeps_the_cache() -> None:
    made = drafter()
    made.observe([1, 2, 3], NOTHING)
    made.draft(4, 2, sampling=Sampling(), key=KEY)
    made.observe([4], NOTHING)
    snapshot = made.state()
    assert snapshot == (1, 2, 3, 4)
    made.observe([5], NOTHING)
    made.restore(snapshot)
    assert made._fed == [1, 2, 3] and made._waiting == [4]
    made.restore((9, 9))
    assert made._fed == [] and made._waiting == [9, 9]


@pytest.mark.parametrize(("n_small", "n_target"), [(12, 15), (15, 12)])
def test_tables_of_one_vocabulary_may_be_padded_to_different_sizes(
    n_small: int, n_target: int
) -> None:
    """Qwen 2.5 has 151936 rows up to 3B and 152064 above: vllm-project/vllm#10913."""
    target = ToyTarget(n_target)
    check_drafter(DraftModelDrafter(ToyTarget(n_small), target), vocab_size=n_target)
    plain = [t for r in generate(Pair(target), [1, n_target - 1], max_tokens=60) for t in r.tokens]
    assert max(plain) >= 12 or n_target == 12  # tokens that the smaller table lacks
    pair = Pair(target, DraftModelDrafter(ToyTarget(n_small, seed=5), target))
    rounds = list(generate(pair, [1, n_target - 1], max_tokens=60))
    assert [t for r in rounds for t in r.tokens] == plain
    assert any(r.n_drafted for r in rounds)


def test_nothing_is_drafted_where_the_small_models_context_ends() -> None:
    """A draft model with a shorter context than its target: ggml-org/llama.cpp#22554."""
    target, small = ToyTarget(), ToyTarget(context_length=20)
    rows: list[int] = []
    verify = small.verify
    small.verify = lambda block, cache, **taps: (  # type: ignore[method-assign]
        rows.append(cache.offset + block.shape[0]) or verify(block, cache, **taps)
    )
    plain = [t for r in generate(Pair(target), [1, 2], max_tokens=40) for t in r.tokens]
    made = DraftModelDrafter(small, target)
    rounds = list(generate(Pair(target, made), [1, 2], max_tokens=40))
    assert [t for r in rounds for t in r.tokens] == plain
    assert max(rows) == 20  # to its end, and no further
    assert {r.kind for r in rounds[-8:]} == {"plain"}
    made.restore(tuple(range(12)) * 4)  # a kept prompt that is longer than its context
    assert made.draft(3, 4, sampling=Sampling(), key=KEY).n_drafted == 0
    made.restore((1, 2))
    assert made.draft(3, 4, sampling=Sampling(), key=KEY).n_drafted == 4


class Counting(ToyTarget):
    """Counts the rows it forwards, and goes back to any length."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.n_rows = 0
        self.breaks = False

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        self.n_rows += block.shape[0]
        output = super().verify(block, cache, taps=taps)
        if self.breaks:
            raise RuntimeError("out of memory")
        return output


class Returning(Counting):
    """One that also freezes and thaws."""

    def freeze(self, cache: ToyCache) -> SimpleNamespace:
        return SimpleNamespace(tokens=cache.tokens, reach=lambda n: n)

    def thaw(self, frozen: SimpleNamespace, n: int) -> ToyCache:
        return ToyCache(frozen.tokens[:n])


@pytest.mark.parametrize("kind", [Counting, Returning])
def test_a_sequence_goes_on_from_where_it_parts_from_the_one_before(kind: type[Counting]) -> None:
    """The small model read a whole conversation again in each of its turns: jundot/omlx#1441."""
    small = kind(seed=5)
    made = DraftModelDrafter(small, ToyTarget())
    first = [(7 * i * i) % 12 for i in range(900)]

    def drafts(prompt: list[int]) -> int:
        made.reset()
        made.observe(prompt[:5], NOTHING)
        made.reset()  # as a kept prompt and the loop do, before anything was drafted
        made.observe(prompt, NOTHING)
        small.n_rows = 0
        tokens = made.draft(3, 4, sampling=Sampling(), key=KEY).tokens.tolist()
        assert tokens == chain(ToyTarget(seed=5), prompt, 3, 4)
        return small.n_rows

    assert drafts(first) > 900
    assert drafts([*first, 3, 4, 5]) < 30
    parted = [*first[:700], 1, 1, 1]
    assert (drafts(parted) < 30) == (kind is Returning)
    assert (drafts(parted[:300]) < 30) == (kind is Returning)
    assert drafts([11, *parted]) > 700  # nothing in common
    assert drafts([11, *parted]) < 30


def test_a_context_that_broke_off_is_not_gone_on_from() -> None:
    small = Counting(seed=5)
    made = DraftModelDrafter(small, ToyTarget())
    made.observe([1, 2, 3], NOTHING)
    made.draft(4, 2, sampling=Sampling(), key=KEY)
    small.breaks = True
    with pytest.raises(RuntimeError, match="out of memory"):
        made.draft(4, 2, sampling=Sampling(), key=KEY)
    small.breaks = False
    made.reset()
    made.observe([1, 2, 3], NOTHING)
    tokens = made.draft(4, 3, sampling=Sampling(), key=KEY).tokens.tolist()
    assert tokens == chain(ToyTarget(seed=5), [1, 2, 3], 4, 3)


def test_a_shorter_context_is_told_at_load(tmp_path: Path) -> None:
    one = tokenizer(tmp_path / "one", ["a", "b", "c"])
    small, target = ToyTarget(context_length=20), ToyTarget(context_length=30)
    with pytest.warns(RuntimeWarning, match='"one" drafts in the first 20 tokens .* has 30'):
        DraftModelDrafter.load(one, target, model=one, open_target=lambda _: (small, None))
    DraftModelDrafter.load(one, small, model=one, open_target=lambda _: (target, None))


def test_less_than_one_draft_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_draft must be >= 1, got 0"):
        drafter(max_draft=0)


def tokenizer(folder: Path, tokens: list[str], added: dict[int, str] | None = None) -> Path:
    folder.mkdir()
    content = {
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}},
        "added_tokens": [{"id": i, "content": t} for i, t in (added or {}).items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_vocabularies_are_compared_string_by_string(tmp_path: Path) -> None:
    one = tokenizer(tmp_path / "one", ["a", "b", "c"], {3: "<end>"})
    permuted = tokenizer(tmp_path / "permuted", ["a", "c", "b"], {3: "<end>"})
    special = tokenizer(tmp_path / "special", ["a", "b", "c"], {3: "<stop>"})
    shorter = tokenizer(tmp_path / "shorter", ["a", "b", "c"])
    model = ToyTarget()
    opened: list[Path] = []

    def open_target(folder: Path) -> tuple[ToyTarget, None]:
        opened.append(folder)
        return model, None

    def load(path: Path) -> DraftModelDrafter:
        return DraftModelDrafter.load(path, ToyTarget(), model=one, open_target=open_target)

    assert load(one).max_draft == 4 and opened == [one]
    target = ToyTarget()
    target.open_beside = open_target  # what the target was loaded with comes before the registry
    DraftModelDrafter.load(one, target, model=one)
    assert opened == [one, one]
    with pytest.raises(LoadError, match='got "c" and "b" for id 1'):
        load(permuted)
    with pytest.raises(LoadError, match='got "<stop>" and "<end>" for id 3'):
        load(special)
    assert load(shorter).max_draft == 4  # it lacks a token that was added to the other one
    (tmp_path / "none").mkdir()
    with pytest.raises(LoadError, match='must have a "tokenizer.json", got none'):
        load(tmp_path / "none")


def test_unigram_vocabularies_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}}))
    assert read_vocabulary(path) == {0: "<unk>", 1: "a"}
    check_same_vocabulary(path, path)
    path.write_text("[]")
    with pytest.raises(LoadError, match="must be a tokenizer.json with a vocabulary"):
        read_vocabulary(path)


class Interrupted(ToyTarget):
    """Breaks off in its n-th call, before or after what the call does."""

    left: int | None = None

    def _tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise KeyboardInterrupt

    def prefill(self, tokens, cache, *, taps=()):
        self._tick()
        return super().prefill(tokens, cache, taps=taps)

    def verify(self, block, cache, *, taps=()):
        self._tick()
        output = super().verify(block, cache, taps=taps)
        self._tick()
        return output

    def commit(self, cache, n_keep):
        self._tick()
        super().commit(cache, n_keep)
        self._tick()


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("left", range(12))
def test_a_draft_that_was_interrupted_is_started_over(left: int, restored: bool) -> None:
    small = Interrupted(seed=5)
    made, committed = DraftModelDrafter(small, ToyTarget()), [(5 * i) % 12 for i in range(1100)]
    made.observe(committed, NOTHING)
    before = made.state()
    small.left = left
    with pytest.raises(KeyboardInterrupt):
        made.draft(3, 2, sampling=Sampling(), key=KEY)
    if restored:
        made.restore(before)
    assert made.state() == before
    tokens = made.draft(3, 2, sampling=Sampling(), key=KEY).tokens.tolist()
    assert tokens == chain(ToyTarget(seed=5), committed, 3, 2)
