"""Speculative decoding in a runtime that is not mlx-lm at all: its own model, its own memory.

    pip install spec-core spec-drafters
    python examples/own_runtime.py

`Engine` stands for such a runtime: one attention layer over a fixed buffer of rows, and a counter
that says how many of them are valid. Taking rows back is moving the counter. `EngineTarget` is all
that spec-core needs to know; `check_target` proves that nothing was forgotten.
"""

from collections.abc import Sequence

import mlx.core as mx

from spec_core import Pair, StateError, StatsMeter, TargetOutput, generate
from spec_core.testing import check_target
from spec_drafters import LookupDrafter

VOCAB, HIDDEN, ROOM = 64, 32, 512


class Engine:
    """The runtime: weights, and a forward that writes rows into a buffer."""

    def __init__(self, seed: int = 2) -> None:
        draw = iter(mx.random.split(mx.random.key(seed), 5))
        self.table = mx.random.normal((VOCAB, HIDDEN), key=next(draw))
        self.places = 0.3 * mx.random.normal((ROOM, HIDDEN), key=next(draw))
        self.q, self.kv, self.o = (
            HIDDEN**-0.5 * mx.random.normal((HIDDEN, n * HIDDEN), key=next(draw)) for n in (1, 2, 1)
        )

    def step(self, tokens: mx.array, memory: "Memory") -> tuple[mx.array, mx.array]:
        """Write the rows of `tokens` (T,) and return (T, V) logits and (T, H) hidden states."""
        start, end = memory.used, memory.used + tokens.shape[0]
        x = self.table[tokens] + self.places[start:end]
        memory.rows[start:end] = x @ self.kv
        keys, values = mx.split(memory.rows[:end], 2, axis=-1)
        scores = (x @ self.q) @ keys.T * HIDDEN**-0.5
        seen = mx.arange(end)[None] <= mx.arange(start, end)[:, None]
        mixed = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ values
        hidden = x + mx.tanh(mixed @ self.o)
        memory.used = end
        return hidden @ self.table.T, hidden


class Memory:
    """The runtime's buffer, with what spec-core asks of a cache."""

    def __init__(self) -> None:
        self.rows = mx.zeros((ROOM, 2 * HIDDEN))
        self.used = self.n_open = 0

    offset = property(lambda self: self.used - self.n_open)
    is_open = property(lambda self: self.n_open > 0)
    nbytes = property(lambda self: self.rows.nbytes)


class EngineTarget:
    """The adapter."""

    vocab_size, hidden_size, n_layers, context_length = VOCAB, HIDDEN, 1, ROOM
    tap_refusal = None
    exact_refusal = "softmax over a growing buffer"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def make_cache(self) -> Memory:
        """An empty buffer."""
        return Memory()

    def prefill(
        self, tokens: Sequence[int], cache: Memory, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """A chunk of the prompt; the last row's logits, every row's taps."""
        output = self.verify(mx.array(list(tokens)), cache, taps=taps)
        self.commit(cache, len(tokens))
        mx.eval(cache.rows)
        return TargetOutput(output.logits[-1:], output.taps)

    def verify(self, block: mx.array, cache: Memory, *, taps: Sequence[int] = ()) -> TargetOutput:
        """One step over a block, left open."""
        if cache.is_open:
            raise StateError("[verify] The block before must be committed first.")
        logits, hidden = self.engine.step(block, cache)
        cache.n_open = block.shape[0]
        return TargetOutput(logits, tuple(hidden for _ in taps))

    def commit(self, cache: Memory, n_keep: int) -> None:
        """Move the counter back over what was not kept."""
        if not cache.is_open:
            raise StateError("[commit] A block must be open.")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError(f"[commit] n_keep must be 0..{cache.n_open}, got {n_keep}.")
        cache.used, cache.n_open = cache.offset + n_keep, 0

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the table."""
        return self.engine.table[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        """The head alone."""
        return hidden @ self.engine.table.T


def main() -> None:
    """Prove the adapter, then decode with and without drafts."""
    target = EngineTarget(Engine())
    check_target(target, prompt=[3, 1, 4, 1, 5], taps=(0,), atol=1e-4)
    ids, rounds = {}, {}
    for name, drafter in (("plain", None), ("lookup", LookupDrafter())):
        meter, tokens = StatsMeter(), list[int]()
        for round_ in generate(Pair(target, drafter), [3, 1, 4, 1, 5], max_tokens=200):
            meter.add(round_)
            tokens += round_.tokens
        ids[name], rounds[name] = tokens, meter.result().n_rounds
    assert ids["plain"] == ids["lookup"]
    print(f"200 tokens: {rounds['plain']} rounds plainly, {rounds['lookup']} with lookup drafts")


if __name__ == "__main__":
    main()
