from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from spec_core import Pair, Sampling, StateError, TargetOutput, generate
from spec_core.testing import ScriptedDrafter, ToyDrafter, ToyTarget


def test_rows_depend_on_the_last_two_tokens():
    target = ToyTarget()
    cache = target.make_cache()
    logits = target.prefill([3, 1, 4], cache).logits
    assert mx.array_equal(logits[0], target.table[1, 4])
    rows = target.verify(mx.array([1, 5]), cache).logits
    assert mx.array_equal(rows[0], target.table[4, 1])
    assert mx.array_equal(rows[1], target.table[1, 5])


def test_the_cache_counts_committed_rows():
    target = ToyTarget()
    cache = target.make_cache()
    target.prefill([3, 1, 4], cache)
    assert (cache.offset, cache.is_open, cache.nbytes) == (3, False, 12)
    target.verify(mx.array([1, 5]), cache)
    assert (cache.offset, cache.is_open) == (3, True)
    target.commit(cache, 1)
    assert cache.tokens.tolist() == [3, 1, 4, 1]


def test_a_second_verify_is_refused():
    target = ToyTarget()
    cache = target.make_cache()
    target.verify(mx.array([1, 5]), cache)
    with pytest.raises(StateError) as error:
        target.verify(mx.array([1]), cache)
    assert str(error.value) == "[verify] The block before must be committed first."


def test_a_commit_without_a_block_is_refused():
    with pytest.raises(StateError) as error:
        ToyTarget().commit(ToyTarget().make_cache(), 0)
    assert str(error.value) == "[commit] No block is open. Call verify first."


@pytest.mark.parametrize("n_keep", [-1, 3])
def test_a_commit_of_rows_that_are_not_there_is_refused(n_keep):
    target = ToyTarget()
    cache = target.make_cache()
    target.verify(mx.array([1, 5]), cache)
    with pytest.raises(ValueError) as error:
        target.commit(cache, n_keep)
    assert str(error.value) == (
        f"[commit] n_keep must be 0..2 for the open block of 2 rows, got {n_keep}."
    )


def test_taps_tell_layers_and_tokens_apart():
    target = ToyTarget()
    taps = target.prefill([3, 1], target.make_cache(), taps=(0, 2)).taps
    assert [tap.shape for tap in taps] == [(2, 8), (2, 8)]
    assert mx.array_equal(taps[1], target.embed(mx.array([3, 1])) + 2)
    assert target.unembed(taps[0]).shape == (2, 12)


def test_two_seeds_make_two_targets():
    assert not mx.array_equal(ToyTarget(seed=0).table, ToyTarget(seed=1).table)
    assert mx.array_equal(ToyTarget(seed=1).table, ToyTarget(seed=1).table)


def test_the_toy_drafter_draws_from_the_rows_it_reports():
    drafter, key = ToyDrafter(), mx.random.key(3)
    greedy = drafter.draft(2, 3, sampling=Sampling(), key=key)
    assert greedy.probs is None
    assert greedy.tokens.tolist()[0] == mx.argmax(drafter.table[2]).item()
    sampled = drafter.draft(2, 9, sampling=Sampling(temperature=0.5), key=key)
    assert sampled.tokens.shape == (4,)
    first = mx.softmax(drafter.table[2] / 0.5)
    assert mx.allclose(sampled.probs[0], first, atol=1e-6)
    assert sampled.source == "toy"


def test_the_scripted_drafter_follows_its_answer_and_ends_with_it():
    drafter = ScriptedDrafter([5, 6, 7, 8], 2, 9, wrong_at=[2, 7], taps=(1,))
    drafter.observe([1, 2], TargetOutput(mx.zeros((1, 9)), (mx.zeros((2, 8)),)))

    def drafts(cap: int) -> list[int]:
        return drafter.draft(5, cap, sampling=Sampling(), key=mx.random.key(0)).tokens.tolist()

    assert (drafts(1), drafts(8)) == ([6], [6, 8, 8])
    snapshot = drafter.state()
    drafter.observe([5, 6, 7], TargetOutput(mx.zeros((1, 9)), (mx.zeros((3, 8)),)))
    assert drafts(8) == []
    drafter.restore(snapshot)
    assert drafts(1) == [6]
    drafter.reset()
    assert drafter.observed == []


def test_the_scripted_drafter_checks_its_taps():
    drafter = ScriptedDrafter([5], 2, 9, taps=(1,))
    with pytest.raises(AssertionError):
        drafter.observe([1, 2], TargetOutput(mx.zeros((1, 9))))
    with pytest.raises(AssertionError):
        drafter.observe([1, 2], TargetOutput(mx.zeros((1, 9)), (mx.zeros((1, 8)),)))


def test_toys_serve_in_any_thread():
    pair, sampling = Pair(ToyTarget(), ToyDrafter()), Sampling(temperature=0.5, seed=1)

    def answer() -> list[int]:
        rounds = generate(pair, [1, 2, 3], max_tokens=20, sampling=sampling)
        return [t for r in rounds for t in r.tokens]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(answer).result()
    assert found == answer()
