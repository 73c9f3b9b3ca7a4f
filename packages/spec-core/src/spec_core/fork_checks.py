"""Conformance checks of what a drafter may offer beyond drafting: forks, joint calls, snapshots.

Parts of `spec_core.testing.check_drafter`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from spec_core.protocols import (
    DraftAsk,
    Drafter,
    DraftsTogether,
    Observation,
    ObservesTogether,
)
from spec_core.sampling import Sampling
from spec_core.types import TargetOutput


def check_fork(drafter: Any, vocab_size: int, hidden_size: int) -> None:
    """Two forks on other sequences, taking turns, draft as one drafter does on each of them."""
    prompts = [[(seed * 5 + i * i) % vocab_size for i in range(7 + seed)] for seed in (1, 2)]
    cap, key = drafter.max_draft, mx.random.key(3)

    def drafts(one: Drafter, anchor: int) -> list[int]:
        return ints(one.draft(anchor, cap, sampling=Sampling(), key=key).tokens)

    want: list[list[int]] = []
    for prompt in prompts:
        drafter.reset()
        feed(drafter, prompt, hidden_size)
        want.append(drafts(drafter, prompt[0]))
    forks = [drafter.fork() for _ in prompts]
    for fork, prompt in zip(forks, prompts, strict=True):
        feed(fork, prompt, hidden_size)
    got = [drafts(fork, prompt[0]) for fork, prompt in zip(forks, prompts, strict=True)]
    assert got == want, "a fork drafts otherwise than the drafter it came from"
    assert drafts(drafter, prompts[-1][0]) == want[-1], "a fork changed the drafter it came from"
    if isinstance(forks[0], DraftsTogether) and forks[0].kin is not None:
        _check_together(forks, [prompt[0] for prompt in prompts], want)
        assert drafts(forks[0], prompts[0][0]) == want[0], "a joint draft moved a drafter on"
    if isinstance(forks[0], ObservesTogether) and forks[0].kin is not None:
        shown = [Observation(fork, [1, 2, 0], _rows_of(fork, 3, hidden_size)) for fork in forks]
        others = [replace(one, drafter=drafter.fork()) for one in shown]
        for one, other, prompt in zip(shown, others, prompts, strict=True):
            feed(other.drafter, prompt, hidden_size)
            one.alone()
        others[0].drafter.observe_together(others)
        pairs = zip(shown, others, strict=True)
        got, want = zip(*([drafts(row.drafter, 1) for row in pair] for pair in pairs), strict=True)
        _check_alike(got, want, "forks draft otherwise after rows seen together")


def _check_together(forks: list[Any], anchors: list[int], alone: list[list[int]]) -> None:
    """A joint draft gives each fork its own draft, to its own cap."""
    assert all(fork.kin is forks[0].kin for fork in forks), "forks must have the same kin"
    key, caps, ids = mx.random.key(3), [forks[0].max_draft, 1], list[list[int]]()
    rows = zip(forks, anchors, caps, strict=True)
    drafts = forks[0].draft_together([DraftAsk(*row, Sampling(), key) for row in rows])
    assert len(drafts) == len(caps), f"{len(drafts)} joint drafts for {len(caps)} asks"
    for draft, cap, want in zip(drafts, caps, alone, strict=True):
        got = want[:cap] if draft is None else ints(draft.tokens)
        assert len(got) <= cap, f"{len(got)} joint drafts of one row for cap {cap}"
        ids.append(got)
    _check_alike(ids, alone, "forks draft otherwise together than alone")


def _check_alike(got: Iterable[list[int]], want: Iterable[list[int]], complaint: str) -> None:
    """At least half of the ids are the same: rounding may change some."""
    pairs = zip(got, want, strict=True)
    alike = [a == b for one, other in pairs for a, b in zip(one, other, strict=False)]
    assert 2 * sum(alike) >= len(alike), complaint


def check_shortened(drafter: Any, vocab_size: int, hidden_size: int) -> None:
    """A shortened snapshot drafts as the drafter did when it had seen no more."""
    prompt = [(5 + i * i) % vocab_size for i in range(14)]
    cap, key = drafter.max_draft, mx.random.key(4)

    def drafts() -> list[int]:
        return ints(drafter.draft(prompt[0], cap, sampling=Sampling(), key=key).tokens)

    drafter.reset()
    feed(drafter, prompt[:9], hidden_size)
    early = drafts()
    feed(drafter, prompt[9:], hidden_size)
    late, state = drafts(), drafter.state()
    short = drafter.shortened(state, 9)
    if short is not None:
        drafter.restore(short)
        assert drafts() == early, "a shortened snapshot drafts otherwise than an early one"
        feed(drafter, prompt[9:], hidden_size)
        assert drafts() == late, "a shortened snapshot does not go on as an early one"
    drafter.restore(state)
    assert drafts() == late, "shortening a snapshot changed it"


def feed(drafter: Drafter, tokens: list[int], hidden_size: int) -> None:
    """Let it observe committed rows with random taps."""
    drafter.observe(tokens, _rows_of(drafter, len(tokens), hidden_size))


def _rows_of(drafter: Drafter, n_rows: int, hidden_size: int) -> TargetOutput:
    """Committed rows as a target's forward gives them, with random taps."""
    shape, layers = (n_rows, hidden_size), drafter.taps
    taps = tuple(mx.random.normal(shape, key=mx.random.key(layer)) for layer in layers)
    return TargetOutput(mx.zeros((n_rows, 1)), taps)


def ints(tokens: mx.array) -> list[int]:
    """Ids on the host."""
    values: list[int] = tokens.tolist()  # pyright: ignore[reportAssignmentType]
    return values
