"""A toy target and toy drafters with the whole contract, for tests and examples.

`ToyTarget` is an order-2 Markov chain with random logits: small enough to compute its distribution
by hand, yet its rows depend on what was committed, so a wrong rollback shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from spec_core.errors import StateError
from spec_core.sampling import Sampling, draw, target_probs
from spec_core.types import Draft, TargetOutput


@dataclass(slots=True)
class ToyCache:
    """Committed ids, and behind them the rows of the open block."""

    tokens: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))
    n_open: int = 0

    @property
    def offset(self) -> int:
        """Number of committed tokens."""
        return self.tokens.shape[0] - self.n_open

    @property
    def is_open(self) -> bool:
        """True between `verify` and `commit`."""
        return self.n_open > 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens.nbytes


class ToyTarget:
    """Logits of the next token depend on the last two.

    Args:
        vocab_size: V.
        seed: Of the random logits.
        scale: Spread of the logits; larger is more predictable.
        context_length: Reported as the model's limit.
    """

    hidden_size = 8
    n_layers = 4
    tap_refusal = None
    exact_refusal = None

    def __init__(
        self,
        vocab_size: int = 12,
        seed: int = 0,
        scale: float = 2.0,
        context_length: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        keys = mx.random.split(mx.random.key(seed), 3)
        self.table = scale * mx.random.normal((vocab_size, vocab_size, vocab_size), key=keys[0])
        self._embedding = mx.random.normal((vocab_size, self.hidden_size), key=keys[1])
        self._head = mx.random.normal((self.hidden_size, vocab_size), key=keys[2])
        mx.eval(self.table, self._embedding, self._head)  # data, so any thread may read it

    def make_cache(self) -> ToyCache:
        """An empty cache."""
        return ToyCache()

    def prefill(
        self, tokens: Sequence[int], cache: ToyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Append a chunk; logits of its last row."""
        output = self.verify(mx.array(tokens, mx.int32), cache, taps=taps)
        self.commit(cache, len(tokens))
        return TargetOutput(output.logits[-1:], output.taps)

    def verify(self, block: mx.array, cache: ToyCache, *, taps: Sequence[int] = ()) -> TargetOutput:
        """Logits after each row of the block; opens it."""
        if cache.is_open:
            raise StateError("[verify] The block before must be committed first.")
        n_rows = block.shape[0]
        cache.tokens = mx.concatenate([cache.tokens, block])
        cache.n_open = n_rows
        before = mx.concatenate([mx.zeros((2,), mx.int32), cache.tokens])
        logits = self.table[before[-n_rows - 1 : -1], before[-n_rows:]]  # (T, V)
        hidden = self.embed(block)
        return TargetOutput(logits, tuple(hidden + layer for layer in taps))

    def commit(self, cache: ToyCache, n_keep: int) -> None:
        """Close the block, keeping its first rows."""
        if not cache.is_open:
            raise StateError("[commit] No block is open. Call verify first.")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError(
                f"[commit] n_keep must be 0..{cache.n_open} for the open block of "
                f"{cache.n_open} rows, got {n_keep}."
            )
        cache.tokens = cache.tokens[: cache.offset + n_keep]
        cache.n_open = 0

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of a random table."""
        return self._embedding[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        """A random head."""
        return hidden @ self._head


class ToyDrafter:
    """Draws drafts from an order-1 Markov chain of its own: a drafter that is often wrong.

    Args:
        vocab_size: V.
        seed: Of the random logits.
        max_draft: Most drafts a round.
        taps: Layers it asks for; observed, not used.
    """

    name = "toy"

    def __init__(
        self, vocab_size: int = 12, seed: int = 1, max_draft: int = 4, taps: tuple[int, ...] = ()
    ) -> None:
        self.max_draft = max_draft
        self.taps = taps
        self.table = mx.random.normal((vocab_size, vocab_size), key=mx.random.key(seed))
        mx.eval(self.table)  # data, so any thread may read it
        self.observed: list[int] = []

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """A chain of draws, each from the row of the token before."""
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        last = mx.array(anchor, mx.int32)
        for step_key in mx.random.split(key, min(cap, self.max_draft)):
            logits = self.table[last][None]  # (1, V)
            if sampling.greedy:
                last = mx.argmax(logits[0]).astype(mx.int32)
            else:
                rows.append(target_probs(logits, sampling)[0])
                last = draw(rows[-1], step_key)
            tokens.append(last)
        probs = mx.stack(rows) if rows else None
        return Draft(mx.stack(tokens), probs, source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Remember the ids."""
        self.observed.extend(tokens)

    def reset(self) -> None:
        """Forget them."""
        self.observed = []

    def state(self) -> list[int]:
        """A copy of the observed ids."""
        return list(self.observed)

    def restore(self, state: list[int]) -> None:
        """Take a copy back."""
        self.observed = list(state)


class ScriptedDrafter:
    """Proposes a known continuation, wrong on purpose at chosen positions. Greedy only.

    Args:
        answer: The tokens that follow the prompt, the first one included.
        n_prompt: Length of the prompt.
        vocab_size: V.
        max_draft: Most drafts a round.
        wrong_at: 1-based positions within a draft that are replaced by another token.
        taps: Layers it asks for; checked for their shape.
    """

    name = "scripted"

    def __init__(
        self,
        answer: Sequence[int],
        n_prompt: int,
        vocab_size: int,
        max_draft: int = 8,
        wrong_at: Sequence[int] = (),
        taps: tuple[int, ...] = (),
    ) -> None:
        self.answer = list(answer)
        self.n_prompt = n_prompt
        self.vocab_size = vocab_size
        self.max_draft = max_draft
        self.wrong_at = frozenset(wrong_at)
        self.taps = taps
        self.observed: list[int] = []

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """The next tokens of the answer, with the planted mistakes."""
        at = len(self.observed) - self.n_prompt + 1  # index of the token after the anchor
        tokens = self.answer[at : at + min(cap, self.max_draft)]
        for position in self.wrong_at:
            if position <= len(tokens):
                tokens[position - 1] = (tokens[position - 1] + 1) % self.vocab_size
        return Draft(mx.array(tokens, mx.int32), source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Remember the ids; each tap must have one row per id."""
        assert len(output.taps) == len(self.taps)
        assert all(tap.shape[0] == len(tokens) for tap in output.taps)
        self.observed.extend(tokens)

    def reset(self) -> None:
        """Forget them."""
        self.observed = []

    def state(self) -> list[int]:
        """A copy of the observed ids."""
        return list(self.observed)

    def restore(self, state: list[int]) -> None:
        """Take a copy back."""
        self.observed = list(state)
