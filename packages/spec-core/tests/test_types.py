import dataclasses

import mlx.core as mx
import pytest

from spec_core import Draft, Round, Target
from spec_core.protocols import BatchTarget, PromptsTogether
from spec_core.testing import ToyDrafter, ToyTarget


def a_round(tokens: tuple[int, ...], n_accepted: int) -> Round:
    return Round(tokens, "", "verify", 4, n_accepted, "toy", 0, 0.1, None)


def test_a_draft_knows_its_length_without_reading_the_device():
    assert Draft(mx.zeros((0,), mx.int32)).n_drafted == 0
    assert Draft(mx.zeros((5,), mx.int32)).n_drafted == 5


@pytest.mark.parametrize(
    ("n_tokens", "n_accepted", "truncated"),
    [(1, 0, False), (4, 3, False), (3, 3, True), (1, 4, True)],
)
def test_a_round_is_truncated_when_it_emits_less_than_it_accepted(n_tokens, n_accepted, truncated):
    assert a_round((1,) * n_tokens, n_accepted).truncated is truncated


def test_rounds_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_round((1,), 0).text = "x"  # pyright: ignore[reportAttributeAccessIssue]


class Costly(ToyTarget):
    """A target whose exactness must not be measured for nothing."""

    @property
    def exact_refusal(self):
        raise RuntimeError("this takes seconds")

    batch_refusal = most_prompt_ids = exact_refusal

    def prefill_rows(self): ...

    join = select = extract = verify_rows = commit_rows = prefill_rows


def test_asking_whether_something_is_a_target_measures_nothing():
    assert isinstance(Costly(), Target) and isinstance(ToyTarget(), Target)
    assert isinstance(Costly(), BatchTarget) and isinstance(Costly(), PromptsTogether)
    assert not isinstance(ToyDrafter(), Target) and not isinstance(object(), Target)


@pytest.mark.parametrize("protocol", [Target, BatchTarget, PromptsTogether])
def test_what_stands_before_a_target_must_have_its_members(protocol):
    """Else its own `prefill` would be passed by; on Python 3.11 as on later ones."""

    class Before:
        def __getattr__(self, name):
            return 0

    assert not isinstance(Before(), protocol)


def test_a_class_may_inherit_the_contract():
    class Own(Target):
        pass

    assert isinstance(Own(), Own) and isinstance(Own(), Target)
    assert not isinstance(ToyTarget(), Own)
