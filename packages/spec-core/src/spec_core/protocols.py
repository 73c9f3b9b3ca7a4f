"""The whole contract: what a target, a drafter and a cap must offer. Nothing to inherit.

This is the one page a plugin author reads. `spec_core.testing` holds `check_target` and
`check_drafter`, which test an implementation against it. A target keeps no state between calls:
everything that belongs to one sequence lives in the cache that `make_cache` returned, so one target
serves many sequences. A drafter serves one sequence at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from spec_core.by_name import ByName
from spec_core.sampling import Sampling
from spec_core.types import Draft, Round, TargetOutput


class Cache(Protocol):
    """One sequence's state in a target. Only the target that made it may change it."""

    @property
    def offset(self) -> int:
        """Number of committed tokens, N; rows of an open block are not counted."""
        ...

    @property
    def is_open(self) -> bool:
        """True between `verify` and `commit`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        ...


@runtime_checkable
class Target(Protocol, metaclass=ByName):
    """The model whose distribution is reproduced exactly."""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """H, the width of the residual stream that taps see."""
        ...

    @property
    def n_layers(self) -> int:
        """Number of decoder layers, in the count that tap ids use."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, or None where it has no limit."""
        ...

    @property
    def tap_refusal(self) -> str | None:
        """None when layers can be tapped faithfully, else the reason why not."""
        ...

    @property
    def exact_refusal(self) -> str | None:
        """None when a row's bits do not depend on the rows beside it, else the op that fails."""
        ...

    def make_cache(self) -> Any:
        """A new, empty `Cache`."""
        ...

    def prefill(
        self, tokens: Sequence[int], cache: Any, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Append one chunk of the prompt to the cache.

        The cache is evaluated; the logits are lazy and cost nothing unless they are read.

        Args:
            tokens: At least one id.
            cache: Not open.
            taps: Layers to record, ascending, 0-based (output of that layer).

        Returns:
            Logits of the last row, shape (1, V), and taps for every row of the chunk.
        """
        ...

    def verify(self, block: mx.array, cache: Any, *, taps: Sequence[int] = ()) -> TargetOutput:
        """Forward a block `[anchor, d1..dk]` and leave it open. Evaluates nothing.

        Args:
            block: Shape (T,), int32, T >= 1; may be unevaluated.
            cache: Not open; a second verify before `commit` raises StateError.
            taps: As in `prefill`.

        Returns:
            Logits of shape (T, V): row i is the distribution after block[i].
        """
        ...

    def commit(self, cache: Any, n_keep: int) -> None:
        """Close the open block and keep its first `n_keep` rows; the rest leaves no trace.

        Keeping 0 rows abandons the block, as after a stop or an error.

        Raises:
            StateError: no block is open.
            ValueError: n_keep is outside 0..T.
        """
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the raw embedding table, no scaling: (T,) -> (T, H)."""
        ...

    def unembed(self, hidden: mx.array) -> mx.array:
        """The raw head, no final norm, multiplier or softcap: (T, H) -> (T, V)."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes what follows the anchor. Keeps its own context of committed rows."""

    @property
    def name(self) -> str:
        """The mode it implements, such as "lookup"; the default source of its drafts."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it wants to observe, ascending; empty for none."""
        ...

    @property
    def max_draft(self) -> int:
        """Most drafts it can propose in one round."""
        ...

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Propose at most `cap` tokens to follow the anchor. Reads nothing from the device.

        Args:
            anchor: The newest emitted token; not observed yet.
            cap: At least 1.
            sampling: The request's settings. At temperature 0 drafts are arg-maxima and `probs` is
                None; above it `probs` are the distributions the tokens were drawn from.
            key: Randomness for this round.
        """
        ...

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Take in committed rows: ids and, row for row, the taps of the forward that wrote them.

        Called for each prompt chunk, then after each round with `[anchor, accepted...]`; never with
        rejected drafts, and not with the new anchor. Rounds in which nothing was asked come as one
        call, before the next draft at the latest, with the last row's logits.
        """
        ...

    def reset(self) -> None:
        """Forget the sequence; the next call is the first `observe` of another."""
        ...

    def state(self) -> Any:
        """A snapshot of the context that later calls do not change, for prefix caching."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from a snapshot that `state` gave."""
        ...


@runtime_checkable
class Shortenable(Protocol):
    """A drafter whose snapshots also serve for a beginning of what they saw."""

    def shortened(self, state: Any, n_rows: int) -> Any:
        """What `state` would have given after the first `n_rows` rows; None where it cannot say."""
        ...


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """One row's call of `Drafter.draft`, as data.

    Attributes:
        drafter: The row's own drafter, with its own context.
        anchor: As in `draft`.
        cap: As in `draft`; differs by row.
        sampling: As in `draft`.
        key: As in `draft`.
    """

    drafter: Drafter
    anchor: int
    cap: int
    sampling: Sampling
    key: mx.array

    def alone(self) -> Draft:
        """Make the call."""
        return self.drafter.draft(self.anchor, self.cap, sampling=self.sampling, key=self.key)


@runtime_checkable
class DraftsTogether(Protocol):
    """A drafter that drafts in one forward with others of its kin, such as its forks.

    Optional: rows whose drafters lack it are asked one by one. Only greedy rows are asked together,
    since what a sampled row draws must not depend on the rows beside it.
    """

    @property
    def kin(self) -> object | None:
        """The same object for all drafters that draft together; None for one that goes alone."""
        ...

    def draft_together(self, asks: Sequence[DraftAsk]) -> Sequence[Draft | None]:
        """What `draft` would give for each ask, up to rounding. Reads nothing from the device.

        Called on the first ask's drafter; the drafters differ, and all have its `kin`. When it
        raises, gives a draft that breaks the contract, or None for an ask, the drafter is asked by
        `draft`, in the same round and with the same key; it must not have moved on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """One row's call of `Drafter.observe`, as data.

    Attributes:
        drafter: The row's own drafter.
        tokens: As in `observe`.
        output: As in `observe`.
    """

    drafter: Drafter
    tokens: Sequence[int]
    output: TargetOutput

    def alone(self) -> None:
        """Make the call."""
        self.drafter.observe(self.tokens, self.output)


@runtime_checkable
class ObservesTogether(Protocol):
    """A drafter that takes in rows together with others of its kin, after a shared round.

    Optional, as `DraftsTogether`, and for greedy rows too.
    """

    @property
    def kin(self) -> object | None:
        """As in `DraftsTogether`."""
        ...

    def observe_together(self, observations: Sequence[Observation]) -> None:
        """As `observe` of each, up to rounding. Called on the first observation's drafter.

        When it raises, no drafter has taken anything in: each is then shown its rows by `observe`.
        """
        ...


class Cap(Protocol):
    """How many drafts are worth verifying in the next round."""

    def next(self) -> int:
        """The cap, at least 0. 0 asks for a plain step, which the loop pipelines.

        Asked once a round; for a plain step before the round ahead of it has been observed.
        """
        ...

    def observe(self, round_: Round) -> None:
        """Learn from a finished round; the first one of a sequence has kind "prefill"."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A cap that says how far it would ever go; in a crowd, that alone counts of it."""

    @property
    def most(self) -> int:
        """The largest cap it may ask for."""
        ...


class Tokenizer(Protocol):
    """What the loop needs to turn a prompt into ids and ids into text."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids; a character cut in half appears as U+FFFD. Special tokens give nothing."""
        ...


@runtime_checkable
class BatchTarget(Protocol, metaclass=ByName):
    """What a target offers beside `Target` to verify several sequences in one forward.

    A batch cache holds one sequence per row, B of them, each with its own offset.
    """

    @property
    def batch_refusal(self) -> str | None:
        """None when sequences can share a forward, else the reason why not."""
        ...

    def join(self, caches: Sequence[Any]) -> Any:
        """One batch cache of single ones and batch caches, rows in order; the parts are consumed.

        None of them is open.
        """
        ...

    def select(self, cache: Any, rows: Sequence[int]) -> Any:
        """A batch cache of some rows; the cache is consumed. It is not open."""
        ...

    def extract(self, cache: Any, row: int) -> Any:
        """A single cache that goes on with one row; the batch cache stays usable."""
        ...

    def verify_rows(
        self, blocks: mx.array, cache: Any, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Forward one block per row, shape (B, T), and leave them open. Evaluates nothing.

        When it raises, the cache is as it was.

        Returns:
            Logits of shape (B, T, V), taps of shape (B, T, H).
        """
        ...

    def commit_rows(self, cache: Any, n_keep: Sequence[int]) -> None:
        """Close the blocks; of row b keep the first `n_keep[b]` positions, 0..T."""
        ...


@runtime_checkable
class PromptsTogether(Protocol, metaclass=ByName):
    """A target that forwards short prompts of several sequences at once; optional.

    Asked only where rows can share forwards anyway: see `BatchTarget`.
    """

    @property
    def most_prompt_ids(self) -> int:
        """Most ids of a prompt that is forwarded with others; 0 where that does not pay."""
        ...

    def prefill_rows(
        self, prompts: Sequence[Sequence[int]], caches: Sequence[Any], *, taps: Sequence[int] = ()
    ) -> list[TargetOutput]:
        """What `prefill` of each whole prompt on its own new cache gives, up to rounding.

        When it raises, the caches are dropped.
        """
        ...


class Crowd(Protocol):
    """Decides how much rows that share a forward may draft."""

    def cap(self, width: int) -> int:
        """Most drafts of each of `width` rows in the round that begins now; 0 parks.

        Asked once a round; for a plain step before the round ahead of it has been observed.
        """
        ...

    def observe(self, width: int, cap: int, rounds: Sequence[Round], seconds: float) -> None:
        """Learn from a shared round: the cap it was given, its rows' rounds, its wall time."""
        ...

    def saw(self, round_: Round) -> None:
        """Learn from the round of a row on its own."""
        ...
