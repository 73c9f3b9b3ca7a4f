"""Several sequences through one forward of an mlx-lm model: join, verify, commit, part.

Whether a model can do that is tried, not guessed: two sequences of different lengths must give what
each gives alone. Knows nothing about drafts or sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from spec_core import StateError, TargetOutput
from spec_kernels import KernelError
from spec_targets.ragged import BatchEntry, Places, can_join, joined, reads_whole

RowsForward = Callable[[mx.array, list[Any], Sequence[int]], tuple[mx.array, tuple[mx.array, ...]]]


@dataclass(slots=True)
class BatchCache:
    """B sequences' state, one row each, in P places.

    Where each number of rows costs a device a start of its own, P is the next power of two: rows
    that have left go on unread, and a sequence may stand in two places.

    Attributes:
        entries: One batch entry per cache entry of the model, of P rows.
        held: Committed tokens by place, (P,).
        places: Each row's place, (B,).
        padded: Whether P is a power of two.
        n_open: Positions of the open blocks, 0 when closed.
    """

    entries: list[BatchEntry]
    held: list[int]
    places: list[int]
    padded: bool = False
    n_open: int = 0

    @property
    def offsets(self) -> list[int]:
        """Committed tokens per row."""
        return [self.held[place] for place in self.places]

    @property
    def is_whole(self) -> bool:
        """Whether each place is a row's, in order."""
        return self.places == list(range(len(self.held)))

    def spread(self, blocks: mx.array) -> mx.array:
        """Ids of rows (B, T), by place: (P, T)."""
        if self.is_whole:
            return blocks
        row_of = {place: row for row, place in enumerate(self.places)}
        return blocks[mx.array([row_of.get(place, 0) for place in range(len(self.held))])]

    def gathered(self, output: TargetOutput) -> TargetOutput:
        """What a forward gave by place, by row."""
        if self.is_whole:
            return output
        places = mx.array(self.places, mx.int32)
        return TargetOutput(output.logits[places], tuple(tap[places] for tap in output.taps))

    @property
    def is_open(self) -> bool:
        """True between `verify_rows` and `commit_rows`."""
        return self.n_open > 0

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(entry.nbytes for entry in self.entries)


def join(caches: Sequence[Any], *, padded: bool = False) -> BatchCache:
    """One batch cache of single and batch caches, rows in order.

    Args:
        caches: They are consumed.
        padded: Make the number of places a power of two, where all is plain keys and values.

    Raises:
        StateError: one of them is open.
    """
    if any(cache.is_open for cache in caches):
        raise StateError("[join] An open block must be committed first.")
    held: list[int] = []
    for cache in caches:
        if isinstance(cache, BatchCache):
            _move(cache, cache.places)
            held += cache.held
        else:
            held.append(cache.offset)
    layers = zip(*(cache.entries for cache in caches), strict=True)
    batch = BatchCache([joined(parts) for parts in layers], held, list(range(len(held))))
    batch.padded = padded and can_read_whole(batch)
    return select(batch, batch.places)


def select(cache: BatchCache, rows: Sequence[int]) -> BatchCache:
    """The batch cache cut to some rows, in this order."""
    places = [cache.places[row] for row in rows]
    n_places = power_of_two(len(places)) if cache.padded else len(places)
    if cache.padded and n_places == len(cache.held) and len(set(places)) == len(places):
        cache.places = places
        return cache
    _move(cache, [*places, *[places[0]] * (n_places - len(places))])
    del cache.places[len(places) :]
    return cache


def _move(cache: BatchCache, places: Sequence[int]) -> None:
    """Make these places the cache's only ones, in this order."""
    if list(places) != list(range(len(cache.held))):
        for entry in cache.entries:
            entry.select(places)
    cache.held = [cache.held[place] for place in places]
    cache.places = list(range(len(places)))


def power_of_two(n: int) -> int:
    """The least one that is no less than `n`, at least 1."""
    return 1 << (n - 1).bit_length()


def can_read_whole(cache: BatchCache) -> bool:
    """Whether all that the cache holds are plain keys and values."""
    return all(reads_whole(entry) for entry in cache.entries)


def verify_rows(
    forward: RowsForward,
    blocks: mx.array,
    cache: BatchCache,
    taps: Sequence[int],
    *,
    whole: bool = False,
) -> TargetOutput:
    """Forward blocks of all places and leave them open: logits (P, T, V), taps (P, T, H).

    A forward that breaks off leaves no trace: layers that had gone ahead are taken back.

    Args:
        forward: The model.
        blocks: Ids, (P, T).
        cache: With as many places.
        taps: Layers to record.
        whole: Hand whole buffers to attention kernels, without masks; see `can_read_whole`.

    Raises:
        StateError: blocks are open.
        KernelError: a layer cannot read whole buffers.
    """
    if cache.is_open:
        raise StateError(f"[verify] Blocks of {cache.n_open} rows are open. Call commit first.")
    n_new = blocks.shape[1]
    places = Places(n_new, cache.held, whole=whole)
    try:
        for entry in cache.entries:
            entry.prepare(places)
        logits, tapped = forward(blocks, cache.entries, taps)
        if whole and any(getattr(entry, "unread", True) for entry in cache.entries):
            raise KernelError("[ragged] Keys must be read by the kernel, got other code.")
    except BaseException:
        for entry in cache.entries:
            entry.undo()
        raise
    cache.n_open = n_new
    return TargetOutput(logits, tapped)


def commit_rows(cache: BatchCache, n_keep: Sequence[int]) -> None:
    """Close the blocks; row b keeps its first `n_keep[b]` positions.

    Raises:
        StateError: no block is open.
        ValueError: a count is outside 0..T, or there is not one for each row.
    """
    if not cache.is_open:
        raise StateError("[commit] No block is open. Call verify first.")
    if len(n_keep) != len(cache.places) or any(not 0 <= n <= cache.n_open for n in n_keep):
        raise ValueError(
            f"[commit] n_keep must hold {len(cache.places)} numbers in 0..{cache.n_open}, "
            f"got {list(n_keep)}."
        )
    kept = [0] * len(cache.held)
    for place, n in zip(cache.places, n_keep, strict=True):
        kept[place] = n
    for entry in cache.entries:
        entry.keep(cache.n_open, kept)
    cache.held = [held + n for held, n in zip(cache.held, kept, strict=True)]
    cache.n_open = 0


def _agree(got: mx.array, alone: mx.array) -> bool:
    """Whether logits differ by no more than rounding.

    In 16 bits a forward of another shape may be off by some hundredths of the logits' spread; one
    key too few or too many is off by more than half of it.
    """
    limit = 0.01 if alone.dtype == mx.float32 else 0.2
    got, alone = got.astype(mx.float32), alone.astype(mx.float32)
    spread = alone - alone.mean(axis=-1, keepdims=True)
    near = mx.square(got - alone).mean() <= limit**2 * mx.square(spread).mean()
    return bool(near.item())  # sync: once, when first asked


def find_batch_refusal(target: Any) -> str | None:
    """Why sequences cannot share a forward of this target, or None: a small trial.

    Two sequences of different lengths, a block of three after each, against the same blocks alone.
    """
    entries = target.make_cache().entries
    unknown = next((e for e in entries if not can_join(e)), None)
    if unknown is not None:
        return f"a layer keeps a {type(unknown).__name__}, which holds one sequence"
    prompts, block = ((1, 2, 3, 4), (3, 1)), (2, 1, 3)
    want: list[mx.array] = []
    singles: list[Any] = []
    for prompt in prompts:
        for caches in (singles, want):
            cache = target.make_cache()
            target.prefill(prompt, cache)
            if caches is singles:
                singles.append(cache)
            else:
                want.append(target.verify(mx.array(block, mx.int32), cache).logits)
    try:
        batch = target.join(singles)
        got = target.verify_rows(mx.array([block, block], mx.int32), batch).logits
        agrees = _agree(got, mx.stack(want))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        return f"the model's layers take one sequence at a time ({type(error).__name__}: {error})"
    if not agrees:
        return "a sequence's result depends on the sequences beside it"
    return None
