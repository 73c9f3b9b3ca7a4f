"""The conformance checks pass on the toys and fail on each way of breaking the contract."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from spec_core import Draft, Sampling, TargetOutput
from spec_core.testing import (
    ScriptedDrafter,
    ToyCache,
    ToyDrafter,
    ToyTarget,
    check_drafter,
    check_target,
)

PROMPT = [3, 1, 4, 1, 5]


def failure(check: Callable[..., None], *arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as error:
        check(*arguments, **options)
    return str(error.value)


def target_failure(target: Any, **options: Any) -> str:
    return failure(check_target, target, prompt=PROMPT, **options)


def drafter_failure(drafter: Any) -> str:
    return failure(check_drafter, drafter, vocab_size=12)


@pytest.mark.parametrize("taps", [(), (0,), (0, 1, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_toy_target_passes(taps, seed):
    check_target(ToyTarget(seed=seed), prompt=PROMPT, taps=taps, seed=seed)


class OffByOne(ToyTarget):
    def commit(self, cache: ToyCache, n_keep: int) -> None:
        n_open = cache.n_open
        super().commit(cache, n_keep)
        if 0 < n_keep < n_open:
            cache.tokens = cache.tokens[:-1]


class WrongRows(ToyTarget):
    """Keeps the last rows of the block, not the first."""

    def commit(self, cache: ToyCache, n_keep: int) -> None:
        start, block = cache.offset, cache.tokens[cache.offset :]
        super().commit(cache, n_keep)
        cache.tokens = mx.concatenate([cache.tokens[:start], block[block.shape[0] - n_keep :]])


class Marked(ToyCache):
    """A cache with a recurrent state: how often each token went by."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.before = mx.zeros((12,))
        self.block = mx.zeros((0,), mx.int32)


class Unrestored(ToyTarget):
    """Rejected rows leave their mark on the recurrent state."""

    def make_cache(self) -> Marked:
        return Marked()

    def verify(self, block: mx.array, cache: Marked, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        one_hot = (block[:, None] == mx.arange(12)[None, :]).astype(mx.float32)
        states = cache.state + mx.cumsum(one_hot, axis=0)
        cache.state = states[-1]
        return TargetOutput(output.logits + states, output.taps)


class Restored(Unrestored):
    """The same state, replayed from where the block began."""

    def verify(self, block: mx.array, cache: Marked, *, taps: Sequence[int] = ()) -> TargetOutput:
        cache.before, cache.block = cache.state, block
        return super().verify(block, cache, taps=taps)

    def commit(self, cache: Marked, n_keep: int) -> None:
        super().commit(cache, n_keep)
        kept = cache.block[:n_keep, None] == mx.arange(12)[None, :]
        cache.state = cache.before + kept.astype(mx.float32).sum(axis=0)


def test_a_target_that_replays_its_recurrent_state_passes():
    check_target(Restored(), prompt=PROMPT, taps=(1,))


class SecondVerify(ToyTarget):
    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        if cache.is_open:
            super().commit(cache, cache.n_open)
        return super().verify(block, cache, taps=taps)


class AnyCommit(ToyTarget):
    def commit(self, cache: ToyCache, n_keep: int) -> None:
        super().commit(cache, max(0, min(n_keep, cache.n_open)))


class SilentCommit(ToyTarget):
    def commit(self, cache: ToyCache, n_keep: int) -> None:
        if cache.is_open:
            super().commit(cache, n_keep)


class OtherError(ToyTarget):
    def commit(self, cache: ToyCache, n_keep: int) -> None:
        if not cache.is_open:
            raise RuntimeError("no block")
        super().commit(cache, n_keep)


class LazyPrefill(ToyTarget):
    """Leaves the last prompt id for later."""

    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        output = super().prefill(tokens, cache, taps=taps)
        cache.tokens = cache.tokens[:-1]
        return output


class EveryRow(ToyTarget):
    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        output = super().verify(mx.array(tokens), cache, taps=taps)
        super().commit(cache, len(tokens))
        return output


class CountsOpenRows(ToyTarget):
    def make_cache(self) -> ToyCache:
        class Counting(ToyCache):
            @property
            def offset(self) -> int:
                return self.tokens.shape[0]

        return Counting()


class SharedCache(ToyTarget):
    def make_cache(self) -> ToyCache:
        self.cache = getattr(self, "cache", None) or super().make_cache()
        return self.cache


class Tapped(ToyTarget):
    """Taps go through `change`."""

    def change(self, taps: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        raise NotImplementedError

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        return TargetOutput(output.logits, self.change(output.taps))


class PositionTaps(Tapped):
    """Each row's tap depends on the width of the block."""

    def change(self, taps: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return tuple(tap * tap.shape[0] for tap in taps)


class MissingTap(Tapped):
    def change(self, taps: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return taps[:1]


class UnaskedTap(Tapped):
    def change(self, taps: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return taps or (mx.zeros((1, 8)),)


class NarrowTap(Tapped):
    def change(self, taps: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return tuple(tap[:, :4] for tap in taps)


class TapsDisturb(ToyTarget):
    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        return TargetOutput(output.logits + 0.01 * len(taps), output.taps)


class FirstRowOnly(ToyTarget):
    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        return TargetOutput(mx.broadcast_to(output.logits[:1], output.logits.shape), output.taps)


class NaNTarget(ToyTarget):
    def __init__(self) -> None:
        super().__init__()
        self.table = self.table * mx.nan


class NarrowHead(ToyTarget):
    def unembed(self, hidden: mx.array) -> mx.array:
        return super().unembed(hidden)[:, 1:]


class FlatEmbedding(ToyTarget):
    def embed(self, tokens: mx.array) -> mx.array:
        return super().embed(tokens).reshape(-1)


class ReversedTaps(ToyTarget):
    """Hands out taps in another order than its layers'."""

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        return super().verify(block, cache, taps=tuple(reversed(taps)))


class NoUnembed:
    """Everything but one member."""

    def __init__(self) -> None:
        self._toy = ToyTarget()
        for name in ("vocab_size", "hidden_size", "n_layers", "context_length"):
            setattr(self, name, getattr(self._toy, name))
        self.tap_refusal = self.exact_refusal = None
        for name in ("make_cache", "prefill", "verify", "commit", "embed"):
            setattr(self, name, getattr(self._toy, name))


@pytest.mark.parametrize(
    ("target", "where"),
    [
        (OffByOne(), "offset after commit(1)"),
        (WrongRows(), "logits of a block of"),
        (Unrestored(), "logits of a block of"),
        (SecondVerify(), "a second verify while open must raise StateError"),
        (AnyCommit(), "commit of more rows than the block has must raise ValueError"),
        (SilentCommit(), "commit without an open block must raise StateError"),
        (OtherError(), "commit without an open block must raise StateError, got RuntimeError"),
        (LazyPrefill(), "prefill must commit what it forwards"),
        (EveryRow(), "prefill must return the last row's logits"),
        (CountsOpenRows(), "verify must open the block, not commit"),
        (SharedCache(), "two caches of one target must be independent"),
        (PositionTaps(), "tap of layer 0 in two chunks"),
        (MissingTap(), "a tap for each layer asked for, expected 2, got 1"),
        (UnaskedTap(), "no taps were asked for"),
        (NarrowTap(), "shape of the tap of layer 0"),
        (TapsDisturb(), "logits with and without taps"),
        (FirstRowOnly(), "prefill in two chunks"),
        (NaNTarget(), "differs by nan, allowed 0.0"),
        (NarrowHead(), "unembed must return (T, V)"),
        (ReversedTaps(), "tap of layer 0 alone and among others"),
        (ToyTarget(context_length=0), "context_length must be a number above 0"),
        (NoUnembed(), "the target lacks a member of spec_core.Target"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_target_fails_and_the_message_says_where(target, where):
    assert where in target_failure(target, taps=(0, 2))


def test_a_prompt_of_one_id_checks_nothing_and_is_refused():
    assert "at least 2 ids" in failure(check_target, ToyTarget(), prompt=[1])


def test_an_embedding_of_another_shape_fails():
    assert "embed must return (T, H)" in target_failure(FlatEmbedding())


class Rounding(ToyTarget):
    """A block of several rows is computed a little differently from one row."""

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().verify(block, cache, taps=taps)
        return TargetOutput(output.logits + 1e-4 * (block.shape[0] > 1), output.taps)


def test_a_tolerance_admits_rounding_and_no_more():
    check_target(Rounding(), prompt=PROMPT, atol=2e-4)
    assert "allowed 5e-05" in target_failure(Rounding(), atol=5e-5)


@pytest.mark.parametrize("taps", [(), (1, 2)])
def test_the_toy_drafter_passes(taps):
    drafter = ToyDrafter(taps=taps)
    check_drafter(drafter, vocab_size=12)
    assert drafter.observed == []


def test_the_scripted_drafter_passes():
    check_drafter(ScriptedDrafter(list(range(12)) * 20, 9, 12), vocab_size=12)


class Confident(ToyDrafter):
    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        draft = super().draft(anchor, cap, sampling=sampling, key=key)
        return Draft(draft.tokens, draft.probs, mx.zeros((draft.n_drafted,)), "confident")


def test_a_drafter_with_confidence_passes():
    check_drafter(Confident(), vocab_size=12)


class Changed(ToyDrafter):
    """A drafter whose draft goes through `change`."""

    def __init__(self, change: Callable[[Draft, Sampling], Draft]) -> None:
        super().__init__()
        self.change = change

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        return self.change(super().draft(anchor, cap, sampling=sampling, key=key), sampling)


def alias_state() -> ToyDrafter:
    """state() hands out the list that observe() goes on changing."""

    class Aliased(ToyDrafter):
        def state(self) -> list[int]:
            return self.observed

        def restore(self, state: list[int]) -> None:
            self.observed = state

        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            shift = sum(self.observed)
            return super().draft((anchor + shift) % 12, cap, sampling=sampling, key=key)

    return Aliased()


def drifting() -> ToyDrafter:
    """Each draft changes what the next one is, and restore() does not bring it back."""

    class Drifting(ToyDrafter):
        n = 0

        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            self.n += 1
            return super().draft((anchor + self.n) % 12, cap, sampling=sampling, key=key)

    return Drifting()


def other_temperature() -> ToyDrafter:
    """Draws at one temperature and reports the probabilities of another."""

    class Other(ToyDrafter):
        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            draft = super().draft(anchor, cap, sampling=sampling, key=key)
            if draft.probs is None:
                return draft
            probs = draft.probs**2
            return Draft(draft.tokens, probs / probs.sum(axis=-1, keepdims=True))

    return Other()


def later_slots_sharper() -> ToyDrafter:
    """Reports the first slot's probabilities truly, and sharpens those of the others."""

    def sharpen(draft: Draft, sampling: Sampling) -> Draft:
        if draft.probs is None:
            return draft
        sharp = mx.softmax(3 * mx.log(draft.probs[1:]), axis=-1)
        return Draft(draft.tokens, mx.concatenate([draft.probs[:1], sharp]))

    return Changed(sharpen)


def picky() -> ToyDrafter:
    """Cuts the draft before a token it has already drawn and does not like."""

    def cut(draft: Draft, sampling: Sampling) -> Draft:
        if draft.probs is None or draft.n_drafted < 2:
            return draft
        n = 2 if draft.tokens[1].item() < 6 else 1
        return Draft(draft.tokens[:n], draft.probs[:n])

    return Changed(cut)


def with_fields(**fields: object) -> ToyDrafter:
    drafter = ToyDrafter()
    vars(drafter).update(fields)
    return drafter


@pytest.mark.parametrize(
    ("drafter", "where"),
    [
        (object(), "the drafter lacks a member of spec_core.Drafter"),
        (with_fields(max_draft=0), "max_draft must be at least 1"),
        (with_fields(taps=(2, 1)), "taps must ascend"),
        (with_fields(taps=(1, 1)), "taps must ascend"),
        (
            Changed(lambda d, s: Draft(mx.zeros((5,), mx.int32))),
            "drafts, got 5",
        ),
        (Changed(lambda d, s: Draft(d.tokens[None])), "at most"),
        (Changed(lambda d, s: Draft(d.tokens + 12)), "ids outside the vocabulary"),
        (Changed(lambda d, s: Draft(d.tokens - 12)), "ids outside the vocabulary"),
        (
            Changed(lambda d, s: Draft(d.tokens, mx.full((d.n_drafted, 12), 1 / 12))),
            "greedy round 0: greedy drafts carry no probs",
        ),
        (
            Changed(lambda d, s: d if s.greedy else Draft(d.tokens, d.probs[:, :-1])),
            "sampled round 0: shape of probs",
        ),
        (
            Changed(lambda d, s: d if s.greedy else Draft(d.tokens, d.probs * 0.9)),
            "sampled round 0: a row of probs sums to 0.",
        ),
        (
            Changed(lambda d, s: d if s.greedy else Draft((d.tokens + 1) % 12, d.probs)),
            "drawn from",
        ),
        (other_temperature(), "draft 1 is not drawn from"),
        (later_slots_sharper(), "draft 2 is not drawn from"),
        (picky(), "draft 2 is not drawn from"),
        (
            Changed(lambda d, s: Draft(d.tokens.astype(mx.float32), d.probs)),
            "greedy round 0: tokens must be whole numbers",
        ),
        (
            Changed(lambda d, s: Draft(d.tokens, d.probs, mx.full((d.n_drafted,), mx.nan))),
            "greedy round 0: confidence must be in 0..1",
        ),
        (
            Changed(lambda d, s: Draft(d.tokens, d.probs, mx.zeros((9,)))),
            "greedy round 0: shape of confidence",
        ),
        (alias_state(), "state/restore changed the draft"),
        (drifting(), "state/restore changed the draft"),
    ],
)
def test_a_broken_drafter_fails_and_the_message_says_where(drafter, where):
    assert where in drafter_failure(drafter)


class ZeroProbability(ToyDrafter):
    """Reports probability 0 for the token that it drafts."""

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        token = mx.array([0], mx.int32)
        if sampling.greedy:
            return Draft(token)
        return Draft(token, mx.array([[0.0, 1.0] + [0.0] * 10]))


def test_a_snapshot_that_is_shortened_wrongly_fails():
    class Remembers(ToyDrafter):
        def draft(self, anchor, cap, *, sampling, key):  # depends on what was observed
            return super().draft(sum(self.observed) % 12, cap, sampling=sampling, key=key)

        def shortened(self, state, n_rows):
            return state[:n_rows]

    class Unable(Remembers):
        def shortened(self, state, n_rows):
            return None

    class Late(Remembers):
        def shortened(self, state, n_rows):
            return state[: n_rows + 1]

    class Changing(Remembers):
        def shortened(self, state, n_rows):
            del state[1:]

    check_drafter(Remembers(), vocab_size=12)
    check_drafter(Unable(), vocab_size=12)
    with pytest.raises(AssertionError, match="drafts otherwise than an early one"):
        check_drafter(Late(), vocab_size=12)
    with pytest.raises(AssertionError, match="shortening a snapshot changed it"):
        check_drafter(Changing(), vocab_size=12)


def test_a_draft_of_probability_zero_fails():
    assert "sampled round 0: a draft has probability 0" in drafter_failure(ZeroProbability())
