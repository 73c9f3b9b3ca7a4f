"""Lookup in front of another drafter: who drafts when, and parking."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import Draft, Pair, Sampling, TargetOutput, generate
from spec_core.testing import ToyDrafter, ToyTarget, check_drafter
from spec_drafters import HybridDrafter

from .checkpoints import TinyTarget, write
from .layouts import LAYOUTS

NOTHING = TargetOutput(mx.zeros((0, 1)))
KEY = mx.random.key(0)


def hybrid() -> HybridDrafter:
    return HybridDrafter(ToyDrafter(max_draft=4))


def ask(drafter: HybridDrafter, anchor: int, cap: int = 32) -> Any:
    return drafter.draft(anchor, cap, sampling=Sampling(), key=KEY)


def test_keeps_the_contract() -> None:
    check_drafter(hybrid(), vocab_size=12)


def test_lookup_drafts_a_repetition_and_the_other_drafter_the_rest() -> None:
    drafter = hybrid()
    drafter.observe([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], NOTHING)
    copied = ask(drafter, 4)
    assert copied.source == "lookup" and copied.tokens.tolist()[:4] == [5, 6, 7, 8]
    drafter.observe([4], NOTHING)
    assert ask(drafter, 9).source == "toy"


def test_a_large_cap_is_cut_to_what_the_other_drafter_can() -> None:
    drafter = hybrid()
    drafter.observe([1, 2, 3], NOTHING)
    assert drafter.max_draft == 32
    assert ask(drafter, 5, cap=32).n_drafted == 4


def repeated() -> list[int]:
    return [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]


def round_(drafter: HybridDrafter, n_accepted: int) -> str:
    """One round at the end of a repetition; returns who drafted."""
    draft = ask(drafter, 4)
    tokens = draft.tokens.tolist()[:n_accepted]
    drafter.observe([4, *tokens], NOTHING)
    drafter.observe([0, 9, 11, 1, 2, 3], NOTHING)  # anything, then the repetition again
    return draft.source


def test_lookup_is_parked_where_it_brings_less_and_probed_again() -> None:
    drafter = hybrid()
    drafter.observe([6, 5], NOTHING)
    ask(drafter, 9)  # the other drafter: three accepted
    drafter.observe([9, 0, 0, 0], NOTHING)
    drafter.observe(repeated(), NOTHING)
    assert round_(drafter, 0) == "lookup"
    sources = [round_(drafter, 3) for _ in range(16)]
    assert set(sources) == {"toy"}
    assert round_(drafter, 0) == "lookup"  # the probe fails
    assert {round_(drafter, 3) for _ in range(32)} == {"toy"}
    assert round_(drafter, 6) == "lookup"  # this one wins
    assert round_(drafter, 6) == "lookup"


def test_a_round_that_is_asked_for_twice_counts_once_for_a_parked_lookup() -> None:
    drafter = hybrid()
    drafter.observe([6, 5], NOTHING)
    ask(drafter, 9)
    drafter.observe([9, 0, 0, 0], NOTHING)
    drafter.observe(repeated(), NOTHING)
    assert round_(drafter, 0) == "lookup"
    for _ in range(16):
        ask(drafter, 4)  # its forward fails; the round is repeated
        assert round_(drafter, 3) == "toy"
    assert round_(drafter, 0) == "lookup"


def test_plain_steps_say_nothing_about_either() -> None:
    drafter = hybrid()
    drafter.observe([6, 5], NOTHING)
    ask(drafter, 9)
    drafter.observe([9, 0, 0, 0], NOTHING)
    for token in repeated():
        drafter.observe([token], NOTHING)  # plain steps: no draft was asked for
    assert ask(drafter, 4).source == "lookup"


def test_the_loop_commits_what_the_target_says() -> None:
    target = ToyTarget(scale=6.0)
    plain = [t for r in generate(Pair(target), [1, 2, 3], max_tokens=60) for t in r.tokens]
    rounds = list(generate(Pair(target, hybrid()), [1, 2, 3], max_tokens=60))
    assert [t for r in rounds for t in r.tokens] == plain
    assert {r.source for r in rounds} >= {"lookup", "toy"}


def test_loads_what_it_goes_in_front_of(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    write(tmp_path, layout.config, layout.tensors)
    drafter = HybridDrafter.load(tmp_path, TinyTarget(), mode="dspark")
    assert isinstance(drafter, HybridDrafter) and drafter.other.name == "dspark"
    assert drafter.taps == drafter.other.taps


def test_a_fork_leaves_a_drafter_that_cannot_fork_to_its_first_user() -> None:
    class Echo(ToyDrafter):
        def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
            return Draft(mx.array(self.observed[-cap:], mx.int32), source="echo")

    drafter = HybridDrafter(Echo())
    drafter.observe([1, 2, 3, 4], NOTHING)
    fork = drafter.fork()
    fork.observe([9, 8, 7], NOTHING)
    assert ask(fork, 5, 2).tokens.tolist() == [8, 7]
    assert ask(drafter, 5, 2).tokens.tolist() == [3, 4]
    check_drafter(HybridDrafter(Echo()), vocab_size=12)
