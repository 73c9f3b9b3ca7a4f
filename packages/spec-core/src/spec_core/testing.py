"""Conformance checks for targets and drafters of any distribution: plain asserts, no test runner.

    check_target(MyTarget(), prompt=[1, 5, 2, 7])
    check_drafter(MyDrafter(), vocab_size=32000)

A check that passes says that the loop may use the object; it says nothing about its speed or its
acceptance.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from spec_core.errors import StateError
from spec_core.fork_checks import check_fork, check_shortened, feed, ints
from spec_core.lending import Forkable
from spec_core.protocols import Drafter, Shortenable, Target
from spec_core.sampling import Sampling
from spec_core.toys import ScriptedDrafter, ToyCache, ToyDrafter, ToyTarget
from spec_core.types import TargetOutput

__all__ = [
    "ScriptedDrafter",
    "ToyCache",
    "ToyDrafter",
    "ToyTarget",
    "check_drafter",
    "check_target",
]


def check_target(
    target: Target,
    *,
    prompt: Sequence[int],
    taps: Sequence[int] = (),
    n_rounds: int = 20,
    max_block: int = 6,
    atol: float = 0.0,
    seed: int = 0,
) -> None:
    """Check a target against the contract with random blocks, accepts and rejects.

    After every commit the state must answer like a fresh cache that was fed exactly the committed
    ids, one at a time; this is where a wrong rollback shows.

    Args:
        target: The target to check.
        prompt: At least 2 ids.
        taps: Layers to tap as well, where the target allows it.
        n_rounds: Rounds of random width and random accepted count, rejections at row 0 and full
            accepts included.
        max_block: Widest block.
        atol: Largest allowed difference of logits and taps; 0 asks for equal bits.
        seed: Of the random blocks.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    assert isinstance(target, Target), "the target lacks a member of spec_core.Target"
    assert len(prompt) >= 2, "the prompt must hold at least 2 ids"
    _check_numbers(target)
    _check_states(target, prompt)
    _check_prefill(target, prompt, taps, atol)
    _check_single_taps(target, prompt, taps)
    _check_raw_ends(target)
    rng = _Rng(seed)
    cache = target.make_cache()
    target.prefill(prompt, cache, taps=taps)
    committed = list(prompt)
    for n_round in range(n_rounds):
        where = f"round {n_round}"
        width = rng.between(1, max_block)
        block = [rng.between(0, target.vocab_size - 1) for _ in range(width)]
        output = target.verify(mx.array(block, mx.int32), cache, taps=taps)
        want_logits, want_taps = _by_steps(target, committed, block, taps)
        _same(output.logits, want_logits, atol, f"{where}: logits of a block of {width}")
        _one_tap_a_layer(output, taps)
        for layer, got, want in zip(taps, output.taps, want_taps, strict=True):
            _same(got, want, atol, f"{where}: tap of layer {layer}")
        n_keep = (0, 1, width)[n_round % 4] if n_round % 4 < 3 else rng.between(1, width)
        target.commit(cache, n_keep)
        committed += block[:n_keep]
        assert cache.offset == len(committed), f"{where}: offset after commit({n_keep})"
        assert not cache.is_open, f"{where}: open after commit"


def check_drafter(
    drafter: Drafter,
    *,
    vocab_size: int,
    hidden_size: int = 8,
    n_rounds: int = 12,
    n_draws: int = 200,
    seed: int = 0,
) -> None:
    """Check a drafter against the contract on a random sequence, greedy and sampled.

    Args:
        drafter: The drafter to check; it is reset first and afterwards.
        vocab_size: V of its target.
        hidden_size: H of its target, for the taps it asks for.
        n_rounds: Rounds per setting, with random accepted counts.
        n_draws: Drafts whose tokens, slot by slot, are compared with the probabilities reported for
            them; 0 skips it.
        seed: Of the random sequence.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    assert isinstance(drafter, Drafter), "the drafter lacks a member of spec_core.Drafter"
    assert drafter.max_draft >= 1, "max_draft must be at least 1"
    assert list(drafter.taps) == sorted(set(drafter.taps)), "taps must ascend"
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        rng = _Rng(seed)
        drafter.reset()
        prompt = [rng.between(0, vocab_size - 1) for _ in range(9)]
        feed(drafter, prompt, hidden_size)
        anchor = rng.between(0, vocab_size - 1)
        for n_round in range(n_rounds):
            cap = rng.between(1, drafter.max_draft)
            anchor = _check_round(drafter, anchor, cap, sampling, vocab_size, hidden_size, n_round)
        if not sampling.greedy:
            _check_draws(drafter, anchor, sampling, n_draws)
    if isinstance(drafter, Forkable):
        check_fork(drafter, vocab_size, hidden_size)
    if isinstance(drafter, Shortenable):
        check_shortened(drafter, vocab_size, hidden_size)
    drafter.reset()


def _check_round(
    drafter: Drafter,
    anchor: int,
    cap: int,
    sampling: Sampling,
    vocab_size: int,
    hidden_size: int,
    n_round: int,
) -> int:
    """One draft, repeated from a snapshot; returns the next anchor."""
    where = f"{'greedy' if sampling.greedy else 'sampled'} round {n_round}"
    key = mx.random.key(n_round)
    snapshot = drafter.state()
    draft = drafter.draft(anchor, cap, sampling=sampling, key=key)
    n = draft.n_drafted
    assert draft.tokens.ndim == 1 and n <= cap, f"{where}: at most {cap} drafts, got {n}"
    assert mx.issubdtype(draft.tokens.dtype, mx.integer), f"{where}: tokens must be whole numbers"
    tokens = ints(draft.tokens)
    assert all(0 <= t < vocab_size for t in tokens), f"{where}: ids outside the vocabulary"
    if draft.probs is not None and n:
        assert draft.probs.shape == (n, vocab_size), f"{where}: shape of probs"
        rows = draft.probs.tolist()
        for t, row in zip(tokens, rows, strict=True):  # pyright: ignore[reportArgumentType]
            total: float = sum(row)  # pyright: ignore
            assert abs(total - 1) < 1e-3, f"{where}: a row of probs sums to {total}"
            assert row[t] > 0, f"{where}: a draft has probability 0"  # pyright: ignore
    if sampling.greedy:
        assert draft.probs is None, f"{where}: greedy drafts carry no probs"
    if draft.confidence is not None:
        assert draft.confidence.shape == (n,), f"{where}: shape of confidence"
        chances: list[float] = draft.confidence.tolist()  # pyright: ignore[reportAssignmentType]
        assert all(0 <= c <= 1 for c in chances), f"{where}: confidence must be in 0..1"
    feed(drafter, [anchor, *tokens], hidden_size)  # a snapshot must not follow what comes later
    drafter.restore(snapshot)
    again = drafter.draft(anchor, cap, sampling=sampling, key=key)
    assert ints(again.tokens) == tokens, f"{where}: state/restore changed the draft"
    kept = [anchor, *tokens[: n_round % (n + 1)]]
    feed(drafter, kept, hidden_size)
    return (anchor + 1) % vocab_size


def _check_draws(drafter: Drafter, anchor: int, sampling: Sampling, n_draws: int) -> None:
    """Drafts under many keys must look drawn from the rows of probs that come with them.

    A slot's row may depend on the tokens before it; its expected counts are summed over the draws.
    """
    snapshot = drafter.state()
    drawn: list[list[int]] = [[] for _ in range(drafter.max_draft)]  # by slot
    expected = [mx.zeros((1,))] * drafter.max_draft
    for n in range(n_draws):
        drafter.restore(snapshot)
        key = mx.random.key(n)
        draft = drafter.draft(anchor, drafter.max_draft, sampling=sampling, key=key)
        if draft.probs is None:
            break
        for slot, token in enumerate(ints(draft.tokens)):
            drawn[slot].append(token)
            expected[slot] = expected[slot] + draft.probs[slot].astype(mx.float32)
    drafter.restore(snapshot)
    for slot, (tokens, sums) in enumerate(zip(drawn, expected, strict=True), 1):
        if tokens:
            row: list[float] = sums.tolist()  # pyright: ignore[reportAssignmentType]
            _check_counts(tokens, row, f"draft {slot}")


def _check_counts(tokens: list[int], expected: list[float], what: str) -> None:
    """Chi-square of tokens against the counts their probabilities promise."""
    often = [t for t, e in enumerate(expected) if e >= 5]
    cells = [(tokens.count(t), expected[t]) for t in often]
    rest = max(len(tokens) - sum(e for _, e in cells), 1.0)
    cells.append((sum(t not in often for t in tokens), rest))
    chi_square = sum((seen - e) ** 2 / e for seen, e in cells)
    dof = max(len(often), 1)
    # The point that chance passes three times in ten million (Wilson and Hilferty's cube root).
    limit = dof * (1 - 2 / (9 * dof) + 5 * (2 / (9 * dof)) ** 0.5) ** 3
    assert chi_square <= limit, (
        f"{what} is not drawn from its row of probs: chi-square {chi_square:.0f} over "
        f"{len(tokens)} draws, at most {limit:.0f} by chance"
    )


def _check_states(target: Target, prompt: Sequence[int]) -> None:
    cache = target.make_cache()
    assert cache.offset == 0 and not cache.is_open, "a new cache must be empty and closed"
    _raises(StateError, lambda: target.commit(cache, 1), "commit without an open block")
    target.prefill(prompt, cache)
    assert cache.offset == len(prompt), "prefill must commit what it forwards"
    block = mx.array(list(prompt[:2]), mx.int32)
    target.verify(block, cache)
    assert cache.is_open and cache.offset == len(prompt), "verify must open the block, not commit"
    _raises(StateError, lambda: target.verify(block, cache), "a second verify while open")
    _raises(ValueError, lambda: target.commit(cache, 3), "commit of more rows than the block has")
    _raises(ValueError, lambda: target.commit(cache, -1), "commit of a negative number of rows")
    target.commit(cache, 2)
    other = target.make_cache()
    assert other.offset == 0, "two caches of one target must be independent"


def _check_numbers(target: Target) -> None:
    for name in ("vocab_size", "hidden_size", "n_layers", "context_length"):
        value = getattr(target, name)
        if name == "context_length" and value is None:
            continue
        assert isinstance(value, int) and value >= 1, f"{name} must be a number above 0"


def _check_single_taps(target: Target, prompt: Sequence[int], taps: Sequence[int]) -> None:
    """Several taps at once must come in the order of their layers."""
    cache = target.make_cache()
    target.prefill(prompt, cache)
    block = mx.array(list(prompt[:2]), mx.int32)

    def both(layers: Sequence[int]) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        forwarded = target.prefill(prompt, target.make_cache(), taps=layers).taps
        verified = target.verify(block, cache, taps=layers).taps
        target.commit(cache, 0)
        return forwarded, verified

    together = both(taps)
    for at, layer in enumerate(taps):
        for got, (alone,) in zip(together, both([layer]), strict=True):
            _same(got[at], alone, 0.0, f"tap of layer {layer} alone and among others")


def _check_prefill(target: Target, prompt: Sequence[int], taps: Sequence[int], atol: float) -> None:
    whole, parts = target.make_cache(), target.make_cache()
    want = target.prefill(prompt, whole, taps=taps)
    bare = target.prefill(prompt, target.make_cache())
    assert want.logits.shape == (1, target.vocab_size), "prefill must return the last row's logits"
    assert bare.taps == (), "no taps were asked for"
    _one_tap_a_layer(want, taps)
    _same(bare.logits, want.logits, 0.0, "logits with and without taps")
    split = len(prompt) // 2
    first = target.prefill(prompt[:split], parts, taps=taps)
    second = target.prefill(prompt[split:], parts, taps=taps)
    _same(second.logits, want.logits, atol, "prefill in two chunks")
    for layer, got, a, b in zip(taps, want.taps, first.taps, second.taps, strict=True):
        assert got.shape == (len(prompt), target.hidden_size), f"shape of the tap of layer {layer}"
        _same(mx.concatenate([a, b]), got, atol, f"tap of layer {layer} in two chunks")


def _check_raw_ends(target: Target) -> None:
    hidden = target.embed(mx.array([0, 1], mx.int32))
    assert hidden.shape == (2, target.hidden_size), "embed must return (T, H)"
    assert target.unembed(hidden).shape == (2, target.vocab_size), "unembed must return (T, V)"


def _by_steps(
    target: Target, committed: list[int], block: list[int], taps: Sequence[int]
) -> tuple[mx.array, list[mx.array]]:
    """What plain decoding computes for the rows of a block: a fresh cache, one row at a time."""
    cache: Any = target.make_cache()
    target.prefill(committed, cache)
    logits: list[mx.array] = []
    tapped: list[tuple[mx.array, ...]] = []
    for token in block:
        output = target.verify(mx.array([token], mx.int32), cache, taps=taps)
        target.commit(cache, 1)
        logits.append(output.logits)
        tapped.append(output.taps)
    columns = [mx.concatenate(list(rows)) for rows in zip(*tapped, strict=True)]
    return mx.concatenate(logits), columns


def _one_tap_a_layer(output: TargetOutput, taps: Sequence[int]) -> None:
    n = len(output.taps)
    assert n == len(taps), f"a tap for each layer asked for, expected {len(taps)}, got {n}"


def _same(got: mx.array, want: mx.array, atol: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item()
    assert float(difference) <= atol, f"{what}: differs by {difference}, allowed {atol}"  # pyright: ignore[reportArgumentType]


def _raises(error: type[Exception], call: Any, what: str) -> None:
    try:
        call()
    except error:
        return
    except Exception as other:
        message = f"{what} must raise {error.__name__}, got {type(other).__name__}"
        raise AssertionError(message) from other
    raise AssertionError(f"{what} must raise {error.__name__}")


class _Rng:
    """A tiny generator of its own, so that checks repeat on every Python version."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 2 + 1

    def between(self, low: int, high: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return low + (self._state >> 33) % (high - low + 1)
