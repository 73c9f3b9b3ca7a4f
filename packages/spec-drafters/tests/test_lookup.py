import time

import mlx.core as mx
import pytest

from spec_core import FixedCap, Pair, Sampling, TargetOutput, generate
from spec_core.testing import ToyTarget, check_drafter
from spec_drafters import LookupDrafter

GREEDY = Sampling()
KEY = mx.random.key(0)


def feed(drafter, tokens):
    drafter.observe(tokens, TargetOutput(mx.zeros((len(tokens), 1))))


def drafted(drafter, anchor, cap=64):
    return drafter.draft(anchor, cap, sampling=GREEDY, key=KEY).tokens.tolist()


def fresh(tokens, **options):
    drafter = LookupDrafter(**options)
    feed(drafter, tokens)
    return drafter


def test_it_keeps_the_contract():
    check_drafter(LookupDrafter(), vocab_size=5)
    check_drafter(LookupDrafter(max_draft=4, short_draft=2, min_match=1), vocab_size=3)


def test_what_followed_the_newest_tokens_before_is_proposed():
    drafter = fresh([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 90, 91, 1, 2])
    assert drafted(drafter, 3) == [4, 5, 6, 7, 8, 9]
    assert drafted(drafter, 3, cap=2) == [4, 5]


def test_a_match_shorter_than_min_match_is_a_miss():
    drafter = fresh([1, 2, 3, 4, 5, 90, 2])
    assert drafted(drafter, 3) == []
    assert drafted(fresh([1, 2, 3, 4, 5, 90, 2], min_match=2), 3) == [4, 5, 90, 2, 3, 4]


def test_the_longest_match_wins_over_a_later_shorter_one():
    long_run = [11, 12, 13, 14, 15, 16]
    drafter = fresh([*long_run, 70, 71, 72, 14, 15, 16, 80, 81, 82, *long_run[:-1]])
    assert drafted(drafter, 16)[:3] == [70, 71, 72]


def test_of_equal_matches_the_latest_wins():
    drafter = fresh([1, 2, 3, 70, 71, 1, 2, 3, 80, 81, 1, 2])
    assert drafted(drafter, 3)[:2] == [80, 81]


def test_drafts_grow_with_the_depth_of_a_copy_run():
    run = list(range(100, 160))
    lengths = {}
    for depth in (4, 7, 8, 10, 14, 20):
        drafter = fresh([*run, 7, 8, 9, *run[: depth - 1]])
        lengths[depth] = len(drafted(drafter, run[depth - 1]))
    assert lengths == {4: 6, 7: 6, 8: 16, 10: 20, 14: 28, 20: 32}


def test_a_periodic_tail_is_copied_beyond_its_end():
    assert drafted(fresh([5, 5, 5, 5]), 5) == [5, 5, 5, 5, 5, 5]
    assert drafted(fresh([1, 2, 3, 1, 2, 3, 1]), 2) == [3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("n_asked", [1, 2])
def test_rejected_drafts_park_it_and_probes_back_off(n_asked):
    """A round that is repeated, so that it asks twice, counts once."""
    drafter = fresh([1, 2, 3, 50])
    asked = []
    for n in range(400):
        # the same three tokens keep coming back, and what follows is new each time
        feed(drafter, [1, 2])
        answers = {bool(drafted(drafter, 3)) for _ in range(n_asked)}
        assert len(answers) == 1
        asked += answers
        feed(drafter, [3, 1000 + n])
    first_pause = asked.index(False)
    assert 4 <= first_pause <= 12
    gaps = [len(gap) for gap in "".join("d" if a else "-" for a in asked).split("d") if gap]
    assert gaps[:4] == [8, 16, 32, 64]  # waits longer after each probe that fails


def test_an_accepted_probe_ends_the_parking():
    drafter = fresh([1, 2, 3, 50])
    for n in range(60):
        feed(drafter, [1, 2])
        drafted(drafter, 3)
        feed(drafter, [3, 1000 + n])
    feed(drafter, [4, 5, 6, 7, 8, 9, 10, 11, 12, 4, 5])
    proposals = 0
    for _ in range(200):
        tokens = drafted(drafter, 6)
        proposals += bool(tokens)
        feed(drafter, [6, *(tokens or [7, 8, 9]), 4, 5])
    assert proposals > 60


def test_sampling_drafts_are_one_hot():
    drafter = fresh([1, 2, 3, 4, 1, 2])
    draft = drafter.draft(3, 8, sampling=Sampling(temperature=1.0), key=KEY)
    assert draft.probs is None and draft.source == "lookup"


def test_nothing_is_kept_between_sequences():
    drafter = fresh([1, 2, 3, 4, 5])
    drafter.reset()
    feed(drafter, [1, 2])
    assert drafted(drafter, 3) == []


def test_a_snapshot_is_not_changed_by_later_tokens():
    drafter = fresh([1, 2, 3, 4, 1, 2])
    snapshot = drafter.state()
    feed(drafter, [9, 9, 9, 1, 2])
    drafter.restore(snapshot)
    assert drafted(drafter, 3)[:3] == [4, 1, 2]


def test_the_answer_is_the_targets_own_and_comes_in_fewer_rounds():
    target = ToyTarget(vocab_size=12)
    plain = [t for r in generate(Pair(target), [1, 2, 3], max_tokens=200) for t in r.tokens]
    for cap in range(12):
        rounds = list(
            generate(Pair(target, LookupDrafter()), [1, 2, 3], max_tokens=200, cap=FixedCap(cap))
        )
        assert [t for r in rounds for t in r.tokens] == plain
    assert len(rounds) < 60  # an order-2 chain of 12 symbols soon repeats itself


def test_the_cost_of_a_token_does_not_grow_with_the_context():
    def per_token(n_context):
        drafter = LookupDrafter()
        feed(drafter, [(i * 7919) % 30011 for i in range(n_context)])
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            for i in range(400):
                drafter.draft(i, 8, sampling=GREEDY, key=KEY)
                feed(drafter, [i])
            best = min(best, time.process_time() - start)
        return best

    assert per_token(100_000) < 3 * per_token(1_000)


@pytest.mark.parametrize("options", [{"max_draft": 0}, {"short_draft": 0}, {"min_match": 0}])
def test_arguments_below_one_are_refused(options):
    with pytest.raises(ValueError, match="must be >= 1, got"):
        LookupDrafter(**options)


def test_a_match_that_is_never_measured_cannot_be_asked_for():
    with pytest.raises(ValueError, match="min_match must be at most 64, got 65"):
        LookupDrafter(min_match=65)
    drafter = LookupDrafter(min_match=64)
    drafter.observe([1, 2] * 100, TargetOutput(mx.zeros((0, 1))))
    assert drafter.draft(1, 4, sampling=Sampling(), key=mx.random.key(0)).n_drafted == 4
