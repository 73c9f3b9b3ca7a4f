from collections.abc import Sequence

import mlx.core as mx
import pytest

from spec_calibrate.measure import measure
from spec_core import Draft, Pair, Sampling
from spec_core.toys import ScriptedDrafter, ToyCache, ToyDrafter, ToyTarget
from spec_core.types import TargetOutput


class _Clock:
    """Time that only the toys below move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _SlowTarget(ToyTarget):
    """A toy whose forward takes a known time: by row, by depth, with a cliff."""

    def __init__(
        self, clock: _Clock, noise: Sequence[float] = (1.0,), compile_s: float = 0.0, **options
    ) -> None:
        super().__init__(**options)
        self.compile_s, self.compiled = compile_s, set()
        self.clock, self.noise, self.n_calls = clock, noise, 0
        self.prefilling = False

    def seconds(self, width: int, depth: int) -> float:
        return 0.010 + 0.0005 * width + (0.008 if width > 4 else 0.0) + 1e-6 * width * depth

    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        self.clock.now += 1e-4 * len(tokens)
        self.prefilling = True
        output = super().prefill(tokens, cache, taps=taps)
        self.prefilling = False
        return output

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        if not self.prefilling:
            factor = self.noise[self.n_calls % len(self.noise)]
            self.clock.now += factor * self.seconds(block.shape[0], cache.offset)
            if block.shape[0] not in self.compiled:
                self.compiled.add(block.shape[0])
                self.clock.now += self.compile_s
            self.n_calls += 1
        return super().verify(block, cache, taps=taps)


class _SlowDrafter(ToyDrafter):
    """A chain: each draft takes 2 ms, on top of 1 ms."""

    def __init__(self, clock: _Clock, max_draft: int = 6) -> None:
        super().__init__(max_draft=max_draft)
        self.clock = clock

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        self.clock.now += 0.001 + 0.002 * cap
        return super().draft(anchor, cap, sampling=sampling, key=key)


def _slow_pair(**options) -> tuple[Pair, _Clock, _SlowTarget]:
    clock = _Clock()
    target = _SlowTarget(clock, **options)
    return Pair(target, _SlowDrafter(clock)), clock, target


def test_compiling_a_width_is_not_on_the_budget():
    """A GPU compiles for each width that it meets: no reason to call the machine too slow."""
    pair, clock, target = _slow_pair(compile_s=1.5)
    curves = measure(pair, clock=clock)
    assert curves.noise == 0.0
    assert curves.verify_s(6, 64) == pytest.approx(target.seconds(6, 64), rel=0.02)


def test_no_width_is_measured_that_the_target_does_not_verify():
    pair, clock, target = _slow_pair()
    widths = []
    forward = target.verify
    target.max_block = 4

    def verify(block, *more, **named):
        widths.append(0 if target.prefilling else block.shape[0])
        return forward(block, *more, **named)

    target.verify = verify
    assert measure(pair, clock=clock).max_draft == 3
    assert max(widths) == 4


def test_the_curves_are_what_the_rounds_take():
    pair, clock, target = _slow_pair()
    curves = measure(pair, clock=clock)
    depth = curves.verify[0][0]
    for width in range(1, 8):
        assert curves.verify_s(width, depth) == pytest.approx(target.seconds(width, depth))
    for cap in range(1, 7):
        assert curves.draft_s(cap, "toy") == pytest.approx(0.001 + 0.002 * cap, abs=2e-4)
    assert curves.plain_s(depth) == pytest.approx(target.seconds(1, depth), rel=0.02)
    assert curves.overhead_s == pytest.approx(0.0, abs=2e-4)
    assert curves.max_draft == 6 and curves.noise == 0.0


def test_depth_is_measured_and_goes_on_beyond():
    pair, clock, target = _slow_pair()
    curves = measure(pair, clock=clock)
    assert len(curves.verify) == 2
    for width in (1, 4, 7):
        assert curves.verify_s(width, 8000) == pytest.approx(target.seconds(width, 8000), rel=0.02)
    assert curves.plain_s(8000) == pytest.approx(target.seconds(1, 8000), rel=0.03)


def test_a_short_context_is_measured_within_it():
    pair, clock, _ = _slow_pair(context_length=64)
    curves = measure(pair, clock=clock, prompts=[[1, 2, 3]])
    assert [depth for depth, _ in curves.verify] == [64 - 6 - 1]


def test_a_budget_is_kept_to_about():
    pair, clock, _ = _slow_pair()
    measure(pair, clock=clock, budget_s=5.0)
    assert clock.now < 2 * 5.0


def test_a_slow_machine_gets_fewer_widths_rather_than_minutes():
    pair, clock, target = _slow_pair()
    target.seconds = lambda width, depth: 0.4 * width  # pyright: ignore[reportAttributeAccessIssue]
    curves = measure(pair, clock=clock, budget_s=5.0)
    assert len(curves.verify[0][1].at) < 7
    assert clock.now < 30
    assert curves.verify_s(5, 0) == pytest.approx(2.0)


def test_one_outlier_in_five_does_not_move_the_medians():
    pair, clock, target = _slow_pair(noise=(1.0, 1.01, 0.99, 1.0, 9.0, 1.0, 0.99))
    curves = measure(pair, clock=clock)
    depth = curves.verify[0][0]
    for width in (1, 4, 7):
        assert curves.verify_s(width, depth) == pytest.approx(
            target.seconds(width, depth), rel=0.05
        )
    assert curves.noise < 0.05


def test_a_restless_machine_shows_in_the_noise():
    pair, clock, _ = _slow_pair(noise=(1.0, 2.0, 0.6, 1.5, 0.8, 3.0, 1.2))
    assert measure(pair, clock=clock).noise > 0.15


def test_the_width_is_limited_by_the_wish_and_by_the_drafter():
    pair, clock, _ = _slow_pair()
    assert measure(pair, clock=clock, max_draft=2).verify[0][1].at == (1, 2, 3)
    assert measure(pair, clock=clock, max_draft=99).max_draft == 6


def test_without_a_drafter_only_the_plain_step_is_measured():
    clock = _Clock()
    curves = measure(Pair(_SlowTarget(clock)), clock=clock)
    assert curves.verify[0][1].at == (1,)
    assert curves.max_draft == 0 and not curves.draft and curves.acceptance == ()


def test_acceptance_is_the_share_that_the_target_accepts():
    """Right except at position 3, whatever the prompt."""
    clock, prompt = _Clock(), [3, 1, 4]
    target = _SlowTarget(clock)
    cache, answer = target.make_cache(), []
    token = int(mx.argmax(target.prefill(prompt, cache).logits[0]).item())
    for _ in range(600):
        answer.append(token)
        logits = target.verify(mx.array([token], mx.int32), cache).logits
        target.commit(cache, 1)
        token = int(mx.argmax(logits[0]).item())
    drafter = ScriptedDrafter(answer, len(prompt), vocab_size=12, max_draft=4, wrong_at=(3,))
    curves = measure(Pair(target, drafter), clock=clock, prompts=[prompt])
    assert curves.acceptance == (1.0, 1.0, 0.0)  # position 4 is never reached


def test_drafts_that_overlap_with_the_verify_are_charged_with_what_they_add():
    """Apart, a draft takes 5 ms; in a round it hides behind the verify but for 1 ms."""

    class Hidden(_SlowDrafter):
        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            self.clock.now += 0.001
            return ToyDrafter.draft(self, anchor, cap, sampling=sampling, key=key)

        def restore(self, state: list[int]) -> None:
            super().restore(state)
            self.alone = True

    class Waiting(Hidden):
        alone = False

        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            if self.alone:
                self.clock.now += 0.004
                self.alone = False
            return super().draft(anchor, cap, sampling=sampling, key=key)

    clock = _Clock()
    curves = measure(Pair(_SlowTarget(clock), Waiting(clock)), clock=clock)
    assert curves.draft_s(4, "toy") == pytest.approx(0.001, abs=3e-4)
    assert curves.overhead_s == 0.0


def test_each_source_of_a_hybrid_has_its_own_draft_cost():
    class Hybrid(_SlowDrafter):
        """Every other draft comes from a lookup that costs nothing."""

        n_drafts = 0

        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            self.n_drafts += 1
            if self.n_drafts % 3:
                draft = super().draft(anchor, cap, sampling=sampling, key=key)
                return Draft(draft.tokens, draft.probs, source="head")
            draft = ToyDrafter.draft(self, anchor, cap, sampling=sampling, key=key)
            return Draft(draft.tokens, draft.probs, source="lookup")

    clock = _Clock()
    curves = measure(Pair(_SlowTarget(clock), Hybrid(clock)), clock=clock)
    assert set(curves.draft) == {"head", "lookup"}
    assert curves.draft_s(6, "lookup") < 0.002 < 0.006 < curves.draft_s(6, "head")
    assert curves.source == "head"


def test_temperatures_are_fitted_to_the_confidence_the_drafter_states():
    class Sure(_SlowDrafter):
        """Always sure, mostly wrong."""

        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            draft = super().draft(anchor, cap, sampling=sampling, key=key)
            return Draft(draft.tokens, None, mx.full((draft.n_drafted,), 0.99), "toy")

    clock = _Clock()
    assert measure(Pair(_SlowTarget(clock), _SlowDrafter(clock)), clock=clock).temperatures == ()
    curves = measure(Pair(_SlowTarget(clock), Sure(clock)), clock=clock)
    assert min(curves.temperatures) > 2.0


def test_the_block_of_a_head_that_gives_less_than_is_asked_for_is_found():
    class Short(_SlowDrafter):
        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            return super().draft(anchor, min(cap, 3), sampling=sampling, key=key)

    clock = _Clock()
    assert measure(Pair(_SlowTarget(clock), Short(clock)), clock=clock).blocks == {"toy": 3}
    assert measure(Pair(_SlowTarget(clock), _SlowDrafter(clock)), clock=clock).blocks == {}


def test_a_real_toy_is_measured_with_the_real_clock():
    curves = measure(Pair(ToyTarget(), ToyDrafter()), budget_s=0.2)
    assert curves.plain_s(0) > 0 and curves.verify_s(5, 0) > 0


def test_a_budget_must_be_positive():
    with pytest.raises(ValueError, match="budget_s must be > 0, got 0"):
        measure(Pair(ToyTarget()), budget_s=0)


def test_the_target_and_the_drafter_are_left_usable():
    pair, clock, target = _slow_pair()
    measure(pair, clock=clock)
    cache = target.make_cache()
    target.prefill([1, 2], cache)
    assert pair.drafter is not None and pair.drafter.state() == []


def test_a_source_that_no_round_was_drafted_by_is_left_out():
    class Moody(ToyDrafter):
        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            draft = super().draft(anchor, cap, sampling=sampling, key=key)
            return Draft(draft.tokens, source="rare" if cap == 3 else "")  # rounds ask for 2 and 4

    curves = measure(Pair(ToyTarget(), Moody(max_draft=4)), budget_s=0.2)
    assert set(curves.draft) == {"toy"} and "rare" not in curves.blocks
