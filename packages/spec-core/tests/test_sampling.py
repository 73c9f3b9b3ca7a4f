import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spec_core import Sampling, target_probs
from spec_core.sampling import Seen, count_tokens, draw, penalise, seen_by_row

# One in 2^32 uniform draws is 0; of the 64 of this key, the 55th.
ZERO_AT_55 = mx.array([2690120363, 1134556603], mx.uint32)


def row(*values: float) -> mx.array:
    return mx.array([list(values)])


def probs_of(logits: mx.array, **settings: float) -> np.ndarray:
    return np.array(target_probs(logits, Sampling(**{"temperature": 1.0, **settings})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "[sampling] temperature must be >= 0, got -1.0."),
        ({"top_k": -1}, "[sampling] top_k must be >= 0 (0 = off), got -1."),
        ({"top_p": 0.0}, "[sampling] top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.1}, "[sampling] top_p must be in (0, 1], got 1.1."),
        ({"top_p": math.nan}, "[sampling] top_p must be in (0, 1], got nan."),
        ({"min_p": 1.0}, "[sampling] min_p must be in [0, 1), got 1.0."),
        ({"min_p": -0.1}, "[sampling] min_p must be in [0, 1), got -0.1."),
        (
            {"repetition_penalty": 0.0},
            "[sampling] repetition_penalty must be > 0 (1 = off), got 0.0.",
        ),
        ({"seed": -1}, "[sampling] seed must be in 0..2^64-1, got -1."),
        ({"seed": 2**64}, "[sampling] seed must be in 0..2^64-1, got 18446744073709551616."),
    ],
)
def test_a_setting_outside_its_range_is_refused_with_its_value(settings, message):
    with pytest.raises(ValueError) as error:
        Sampling(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "name", ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_setting_that_is_not_finite_is_refused(name, value):
    with pytest.raises(
        ValueError, match=rf"^\[sampling\] {name} must be a finite number, got {value}"
    ):
        Sampling(**{name: value})


@pytest.mark.parametrize("settings", [{"top_k": 1.5}, {"top_k": "5"}, {"seed": "7"}, {"seed": 0.5}])
def test_a_count_that_is_not_a_whole_number_is_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(TypeError) as error:
        Sampling(**settings)
    assert str(error.value) == f"[sampling] {name} must be a whole number, got {value!r}."


def test_seed_zero_and_the_largest_seed_are_seeds():
    assert Sampling(seed=0).seed == 0
    assert Sampling(seed=2**64 - 1).seed == 2**64 - 1


def test_greedy_settings_have_no_distribution_to_draw_from():
    with pytest.raises(ValueError) as error:
        target_probs(row(0.0, 1.0), Sampling())
    assert str(error.value) == (
        "[sampling] temperature must be > 0 here; greedy takes the arg-max."
    )


@pytest.mark.parametrize(
    ("settings", "penalised"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_settings_know_whether_they_look_back(settings, penalised):
    assert Sampling(**settings).penalised is penalised


def test_top_k_zero_keeps_every_token():
    logits = row(0.3, -1.0, 2.0, 0.0)
    assert np.array_equal(probs_of(logits, top_k=0), probs_of(logits))
    assert (probs_of(logits, top_k=0) > 0).all()


@pytest.mark.parametrize("top_k", [4, 5, 10**9, 2**63 - 1])
def test_top_k_of_the_vocabulary_or_more_keeps_every_token(top_k):
    logits = row(0.3, -1.0, 2.0, 0.0)
    assert np.array_equal(probs_of(logits, top_k=top_k), probs_of(logits))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 1, "top_p": 0.8},
        {"top_k": 1, "top_p": 0.8, "temperature": 0.01},
        {"top_k": 2, "top_p": 0.1},
        {"top_p": 1e-50},
        {"min_p": math.nextafter(1.0, 0.0)},
        {"temperature": 1e-9},
        {"temperature": 5e-324},
    ],
)
def test_settings_that_leave_one_token_leave_the_arg_max(settings):
    probs = probs_of(mx.array([[0.3, -1.0, 2.0, 0.0], [5.0, -900.0, 4.0, 4.9]]), **settings)
    assert probs.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


def test_of_tied_logits_top_k_keeps_the_lower_ids():
    assert probs_of(row(1.0, 2.0, 2.0, 2.0, 1.0), top_k=2).tolist() == [[0, 0.5, 0.5, 0, 0]]


def test_top_p_stops_where_its_mass_is_reached_exactly():
    logits = mx.log(row(0.5, 0.25, 0.125, 0.125))
    assert probs_of(logits, top_p=0.5).tolist() == [[1, 0, 0, 0]]
    assert np.allclose(probs_of(logits, top_p=0.51), [[2 / 3, 1 / 3, 0, 0]])


def test_a_token_at_min_p_exactly_is_kept():
    logits = mx.array([[0.0, math.log(0.5), math.log(0.49)]])
    assert np.allclose(probs_of(logits, min_p=0.5), [[2 / 3, 1 / 3, 0]])


def test_min_p_counts_from_the_most_likely_token():
    logits = mx.log(row(0.5, 0.26, 0.24))
    assert np.allclose(probs_of(logits, min_p=0.5), [[0.5 / 0.76, 0.26 / 0.76, 0]])


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-9, 1e-3, 1e6, 1e38, 1e300])
def test_no_temperature_overflows(temperature):
    probs = probs_of(mx.array([[3e38, -3e38, 0.0, -math.inf]]), temperature=temperature)
    assert np.isfinite(probs).all()
    assert math.isclose(probs.sum(), 1.0, rel_tol=1e-6)
    assert probs[0, 3] == 0


def test_half_precision_logits_give_single_precision_probabilities():
    probs = target_probs(row(0.0, 1.0).astype(mx.bfloat16), Sampling(temperature=1.0))
    assert probs.dtype == mx.float32
    assert np.allclose(np.array(probs), [[1 / (1 + math.e), math.e / (1 + math.e)]])


setting = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
    repetition_penalty=st.floats(0.5, 3.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    settings=setting,
    logits=st.lists(st.integers(-400, 400), min_size=2, max_size=10, unique=True),
    seed=st.integers(0, 2**31),
)
def test_the_distribution_is_the_one_worked_out_in_numpy(reference, settings, logits, seed):
    vocab = len(logits)
    rng = np.random.default_rng(seed)
    prompt, answer = rng.integers(0, vocab, 3).tolist(), rng.integers(0, vocab, 4).tolist()
    scores = np.array(logits) / 100 + 0.003
    seen = Seen(count_tokens(mx.array(prompt), vocab), count_tokens(mx.array(answer), vocab))
    got = np.array(target_probs(penalise(mx.array(scores[None]), settings, seen), settings))[0]
    want = reference(scores, settings, prompt, answer)
    # A token at the very edge of top-p, min-p or a tie may fall either way in float32.
    if ((got > 0) == (want > 0)).all():
        assert np.allclose(got, want, atol=2e-5)
    else:
        assert on_the_edge(settings, reference, scores, prompt, answer)


def on_the_edge(settings, reference, scores, prompt, answer) -> bool:
    """True when a hair more or less of top-p, min-p or a logit changes which tokens survive."""

    def kept(**changes: float) -> tuple[bool, ...]:
        fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        fields += ("presence_penalty", "frequency_penalty")
        values = {name: getattr(settings, name) for name in fields} | changes
        return tuple(reference(scores, Sampling(**values), prompt, answer) > 0)

    variants = {kept()}
    for hair in (1 - 1e-5, 1 + 1e-5):
        variants.add(kept(top_p=min(1.0, settings.top_p * hair)))
        variants.add(kept(min_p=min(0.9999999, settings.min_p * hair)))
        variants.add(kept(frequency_penalty=settings.frequency_penalty * hair + 1e-6 * (hair - 1)))
        variants.add(kept(repetition_penalty=settings.repetition_penalty * hair))
        variants.add(kept(presence_penalty=settings.presence_penalty * hair + 1e-6 * (hair - 1)))
    return len(variants) > 1


def test_counts_are_occurrences():
    assert count_tokens(mx.array([2, 0, 2]), 4).tolist() == [1, 0, 2, 0]


def test_each_row_of_a_block_has_seen_the_drafts_before_it():
    seen = Seen(prompt=mx.array([1.0, 0, 0]), answer=mx.array([0.0, 5, 0]))
    rows = seen_by_row(seen, mx.array([2, 2, 0], mx.int32))
    assert rows.answer.tolist() == [[0, 5, 0], [0, 5, 1], [0, 5, 2], [1, 5, 2]]
    assert rows.prompt.tolist() == [1, 0, 0]


def test_a_block_without_drafts_has_one_row():
    seen = Seen(prompt=mx.zeros((3,)), answer=mx.array([0.0, 5, 0]))
    assert seen_by_row(seen, mx.zeros((0,), mx.int32)).answer.tolist() == [[0, 5, 0]]


def test_presence_and_frequency_count_the_answer_alone():
    seen = Seen(prompt=mx.array([3.0, 0, 0]), answer=mx.array([0.0, 2, 0]))
    settings = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalise(row(1.0, 1.0, 1.0), settings, seen).tolist() == [[1.0, 0.0, 1.0]]


def test_the_repetition_penalty_lowers_what_prompt_or_answer_hold():
    seen = Seen(prompt=mx.array([1.0, 0, 0, 0]), answer=mx.array([0.0, 1, 0, 0]))
    got = penalise(row(2.0, -2.0, 2.0, 0.0), Sampling(repetition_penalty=2.0), seen)
    assert got.tolist() == [[1.0, -4.0, 2.0, 0.0]]


def test_a_token_of_probability_zero_is_never_drawn():
    probs = mx.array([0.0, 1e-30, 0.0, 1 - 1e-30])
    keys = mx.random.split(mx.random.key(0), 50_000)
    drawn = mx.vmap(lambda key: draw(probs, key))(keys)
    assert set(drawn.tolist()) == {3}


def test_a_uniform_draw_of_exactly_zero_wins_no_token_of_probability_zero():
    assert mx.random.uniform(shape=(64,), key=ZERO_AT_55)[55].item() == 0
    assert draw((mx.arange(64) == 3).astype(mx.float32), ZERO_AT_55).item() == 3
    certain = (mx.arange(64) == 55).astype(mx.float32)
    assert draw(certain, ZERO_AT_55).item() == 55
    assert draw(certain[None], ZERO_AT_55).tolist() == [55]


def test_a_rare_token_wins_where_its_uniform_draw_is_small():
    rare = mx.where(mx.arange(64) == 55, 1e-9, (mx.arange(64) == 3).astype(mx.float32))
    assert draw(rare, ZERO_AT_55).item() == 55


def test_one_row_draws_what_it_draws_without_its_axis():
    probs = mx.softmax(mx.random.normal((5000,), key=mx.random.key(1)) * 3)
    keys = mx.random.split(mx.random.key(2), 50)
    assert [draw(probs[None], k).item() for k in keys] == [draw(probs, k).item() for k in keys]


def test_draws_follow_their_probabilities(p_value: Callable[..., float], alpha: float):
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    rows = mx.broadcast_to(mx.array(probs, mx.float32), (100_000, 4))
    drawn = np.array(draw(rows, mx.random.key(5)))
    assert drawn.dtype == np.int32
    assert p_value(np.bincount(drawn, minlength=4), probs) > alpha


@pytest.mark.parametrize(
    ("x", "dof", "tail"),
    [  # standard tables
        (3.841458820694124, 1, 0.05),
        (18.307038053275146, 10, 0.05),
        (23.926968, 1, 1e-6),
        (149.44925, 100, 0.001),
        (67.32755, 100, 0.995),
        (1074.679448805346, 999, 0.04765),
    ],
)
def test_the_chi_square_tail_used_here_agrees_with_the_tables(chi_square_tail, x, dof, tail):
    assert math.isclose(chi_square_tail(x, dof), tail, rel_tol=5e-3)
