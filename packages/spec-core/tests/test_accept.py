import mlx.core as mx
import numpy as np
import pytest

from spec_core import accept_greedy, accept_residual, residual
from spec_core.accept import near_tie

NO_DRAFTS = mx.zeros((0,), mx.int32)
KEYS = mx.random.split(mx.random.key(11), 50_000)


def ids(*values: int) -> mx.array:
    return mx.array(list(values), mx.int32)


def counts(p: mx.array, drafts: mx.array, q: mx.array | None, vocab: int) -> np.ndarray:
    """(n_accepted, next_token) counted over many keys: shape (K + 1, V)."""

    def outcome(key: mx.array) -> mx.array:
        result = accept_residual(p, drafts, q, key)
        return result.n_accepted * vocab + result.next_token

    flat = np.array(mx.vmap(outcome)(KEYS))
    return np.bincount(flat, minlength=p.shape[0] * vocab).reshape(-1, vocab)


@pytest.mark.parametrize(
    ("drafts", "n_accepted", "next_token"),
    [
        ([1, 2, 0], 3, 1),  # all kept: the bonus token
        ([1, 2, 1], 2, 0),
        ([1, 0, 0], 1, 2),  # a right draft after a wrong one does not count
        ([0, 2, 0], 0, 1),
    ],
)
def test_greedy_keeps_drafts_while_they_are_the_arg_max(drafts, n_accepted, next_token):
    logits = mx.array([[0.0, 9, 1], [0, 1, 9], [9, 1, 0], [0, 9, 1]])
    outcome = accept_greedy(logits, ids(*drafts))
    assert outcome.n_accepted.item() == n_accepted
    assert outcome.next_token.item() == next_token
    assert outcome.near_ties.item() == 0
    assert outcome.n_accepted.shape == outcome.next_token.shape == outcome.near_ties.shape == ()


def test_greedy_without_drafts_takes_the_arg_max():
    outcome = accept_greedy(mx.array([[0.0, 3.0, 1.0]]), NO_DRAFTS)
    assert (outcome.n_accepted.item(), outcome.next_token.item()) == (0, 1)


def test_greedy_takes_the_lowest_id_of_a_tie_and_counts_it():
    outcome = accept_greedy(mx.array([[0.0, 3.0, 3.0]]), NO_DRAFTS)
    assert (outcome.next_token.item(), outcome.near_ties.item()) == (1, 1)


def test_near_ties_are_counted_in_the_rows_that_were_used():
    tie, clear = [0.0, 3.0, 3.0], [0.0, 9.0, 3.0]
    logits = mx.array([tie, clear, clear, tie])
    assert accept_greedy(logits, ids(1, 1, 1)).near_ties.item() == 2
    assert accept_greedy(logits, ids(1, 0, 1)).near_ties.item() == 1


@pytest.mark.parametrize(
    ("dtype", "close", "apart"),
    [
        (mx.float32, 128.0 * (1 - 7 * 2**-23), 128.0 * (1 - 9 * 2**-23)),
        (mx.bfloat16, 128.0 * (1 - 7 * 2**-7), 128.0 * (1 - 9 * 2**-7)),
        (mx.float16, 128.0 * (1 - 7 * 2**-10), 128.0 * (1 - 9 * 2**-10)),
    ],
)
def test_a_near_tie_is_a_gap_of_eight_units_in_the_last_place(dtype, close, apart):
    logits = mx.array([[128.0, close, 0], [128.0, apart, 0]]).astype(dtype)
    assert near_tie(logits, mx.argmax(logits, axis=-1)).tolist() == [True, False]


def test_a_near_tie_is_judged_in_the_type_that_the_target_computed_in():
    logits = mx.array([[128.0, 128.0 * (1 - 7 * 2**-7)]])
    assert near_tie(logits, ids(0)).tolist() == [False]
    assert near_tie(logits, ids(0), mx.bfloat16).tolist() == [True]
    assert accept_greedy(logits, NO_DRAFTS, mx.bfloat16).near_ties.item() == 1


def test_a_single_unmasked_token_is_no_tie():
    logits = mx.array([[-mx.inf, 2.0, -mx.inf]])
    assert near_tie(logits, ids(1)).tolist() == [False]


def test_residual_is_the_positive_part_of_p_minus_q():
    got = residual(mx.array([0.5, 0.3, 0.2]), mx.array([0.2, 0.7, 0.1]))
    assert np.allclose(np.array(got), [0.75, 0, 0.25])


def test_residual_of_equal_distributions_is_p():
    p = mx.array([0.5, 0.25, 0.25])
    assert residual(p, p).tolist() == p.tolist()


def test_residual_without_a_draft_is_p():
    assert residual(mx.array([0.5, 0.25, 0.25]), mx.zeros((3,))).tolist() == [0.5, 0.25, 0.25]


def test_residual_refuses_two_shapes():
    with pytest.raises(ValueError) as error:
        residual(mx.zeros((3,)), mx.zeros((4,)))
    assert str(error.value) == "[residual] p and q must have one shape, got (3,) and (4,)."


def test_a_draft_is_kept_with_probability_min_1_p_over_q(p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    q = mx.array([[0.6, 0.3, 0.1]])
    # d = 0: p/q = 1/3; then the bonus row; else norm(max(0, p - q)) = [0, .5, .5].
    want = np.array([[0, 1 / 3, 1 / 3], [0.1 / 3, 0.1 / 3, 0.8 / 3]])
    assert p_value(counts(p, ids(0), q, 3), want) > alpha
    # d = 1: p > q, always kept.
    want = np.array([[0, 0, 0], [0.1, 0.1, 0.8]])
    assert p_value(counts(p, ids(1), q, 3), want) > alpha


def test_a_one_hot_draft_is_kept_with_probability_p(p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    want = np.array([[0.2, 0, 0.3], [0.05, 0.05, 0.4]])
    assert p_value(counts(p, ids(1), None, 3), want) > alpha


def test_the_replacement_is_independent_of_the_draws_that_rejected(p_value, alpha):
    """As many drafts as tokens: one key for both would draw the same numbers twice."""
    p = mx.array([[0.4, 0.3, 0.2, 0.1]] * 5)
    want, left = np.zeros((5, 4)), 1.0
    for at, draft in enumerate([0, 1, 2, 3]):
        want[at] = left * np.array(p[0])
        want[at, draft] = 0
        left *= float(p[0, draft].item())
    want[4] = left * np.array(p[0])
    assert p_value(counts(p, ids(0, 1, 2, 3), None, 4), want) > alpha


def test_an_all_ones_q_at_the_draft_equals_one_hot():
    p = mx.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    q = mx.array([[0.0, 1.0, 0.0]])
    assert np.array_equal(counts(p, ids(1), q, 3), counts(p, ids(1), None, 3))


def test_no_drafts_draws_from_p(p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3]])
    for q in (None, mx.zeros((0, 3))):
        assert p_value(counts(p, NO_DRAFTS, q, 3), np.array(p)) > alpha


def test_a_draft_that_p_excludes_is_never_kept():
    p = mx.array([[0.0, 0.5, 0.5], [1.0, 0, 0]])
    assert counts(p, ids(0), None, 3)[1].sum() == 0
    assert counts(p, ids(0), mx.array([[1.0, 0.0, 0.0]]), 3)[1].sum() == 0
    assert counts(p, ids(0), mx.array([[1e-38, 0.5, 0.5]]), 3)[1].sum() == 0


def test_a_draft_that_p_is_sure_of_is_always_kept():
    p = mx.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    for q in (None, mx.array([[0.5, 0.5, 0.0]])):
        assert counts(p, ids(1), q, 3).tolist() == [[0, 0, 0], [0, 0, len(KEYS)]]


@pytest.mark.parametrize(
    "bad", [[mx.nan, mx.nan, mx.nan], [mx.nan, 0.1, 0.1], [mx.inf, 0.1, 0.1], [0.2, 0.1, -mx.inf]]
)
def test_after_a_row_of_q_that_holds_no_numbers_the_token_follows_p(bad, p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3], [1.0, 0, 0], [1.0, 0, 0]])
    q = mx.array([bad, [1.0, 0, 0]])
    for draft in range(3):
        got = counts(p, ids(draft, 0), q, 3)
        assert got[1:].sum() == 0
        assert p_value(got[0], np.array(p[0])) > alpha


def test_a_bad_row_of_q_leaves_the_rows_before_it_alone(p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [1.0, 0, 0]])
    q = mx.array([[0.6, 0.3, 0.1], [mx.nan, 0.5, 0.5]])
    want = np.array([[0, 1 / 3, 1 / 3], [0.1, 0.1, 0.4 / 3], [0, 0, 0]])
    assert p_value(counts(p, ids(0, 1), q, 3), want) > alpha


@pytest.mark.parametrize("outside", [-1, 3, 1_000_000])
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_draft_outside_the_vocabulary_is_never_kept(outside, with_probs):
    p = mx.array([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    q = mx.array([[0.5, 0.3, 0.2]]) if with_probs else None
    assert counts(p, ids(outside), q, 3)[1].sum() == 0
    outcome = accept_greedy(mx.log(p), ids(outside))
    assert (outcome.n_accepted.item(), outcome.next_token.item()) == (0, 2)


def test_half_precision_draft_probabilities_are_taken_as_they_are(p_value, alpha):
    p = mx.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    q = mx.array([[0.625, 0.25, 0.125]]).astype(mx.bfloat16)
    kept = 0.2 / 0.625
    left = np.array([0, 0.25, 0.175]) / 0.425
    want = np.array([(1 - kept) * left, kept * np.array([0.1, 0.1, 0.8])])
    assert p_value(counts(p, ids(0), q, 3), want) > alpha


def test_the_outcome_depends_on_the_key_alone():
    p = mx.softmax(mx.random.normal((4, 8), key=mx.random.key(0)), axis=-1)
    q = mx.softmax(mx.random.normal((3, 8), key=mx.random.key(1)), axis=-1)
    seen = set()
    for seed in range(30):
        first, second = (accept_residual(p, ids(1, 2, 3), q, mx.random.key(seed)) for _ in "ab")
        assert first.next_token.item() == second.next_token.item()
        assert first.n_accepted.item() == second.n_accepted.item()
        seen.add((first.n_accepted.item(), first.next_token.item()))
    assert len(seen) > 5
