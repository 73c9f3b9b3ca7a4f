"""One model split over several processes: rank 0 decides, the others do as they are told.

Rank 0 runs the usual loop on a `LeadTarget`; drafter, sampling and cap live there alone. Each call
on the target is first sent to the other ranks, which make the same call on their part of the model,
so that all of them commit the same rows. Nothing is decided twice, hence nothing can differ.

Rows travel as they are, without being read: a block may still be unevaluated. Calls travel as a
short header that the other ranks read.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import mlx.core as mx

from spec_core import TargetOutput
from spec_targets.base import MlxTarget, TargetCache

_MOST_TAPS = 32
_HEADER = 4 + _MOST_TAPS  # call, cache id, count, number of taps; then the taps


class _Call(IntEnum):
    MAKE = 1
    PREFILL = 2
    VERIFY = 3
    COMMIT = 4
    DROP = 5
    STOP = 6


class _Wire:
    """Sums over all ranks, to which only rank 0 adds anything."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group

    def share(self, values: mx.array) -> mx.array:
        """Rank 0's values on every rank; the others pass zeros of the same shape."""
        return mx.distributed.all_sum(values, group=self._group, stream=mx.Device(mx.cpu))

    def send(self, call: _Call, cache_id: int = 0, count: int = 0, taps: Sequence[int] = ()):
        """Tell the other ranks what to do next."""
        header = [int(call), cache_id, count, len(taps), *taps]
        padded = header + [0] * (_HEADER - len(header))
        mx.async_eval(self.share(mx.array(padded, mx.int32)))

    def receive(self) -> tuple[_Call, int, int, tuple[int, ...]]:
        """What rank 0 sent: call, cache id, count, taps."""
        header: Any = self.share(mx.zeros((_HEADER,), mx.int32)).tolist()  # sync: what to do next
        call, cache_id, count, n_taps, *taps = header
        return _Call(call), cache_id, count, tuple(taps[:n_taps])


@dataclass(eq=False)
class LeadCache:
    """A sequence's state on rank 0; the other ranks keep theirs under the same id."""

    id: int
    inner: TargetCache

    @property
    def offset(self) -> int:
        """Number of committed tokens."""
        return self.inner.offset

    @property
    def is_open(self) -> bool:
        """True between `verify` and `commit`."""
        return self.inner.is_open

    @property
    def nbytes(self) -> int:
        """Bytes held on rank 0."""
        return self.inner.nbytes


class LeadTarget:
    """The whole model as rank 0 sees it; a target like any other.

    Made by `lead`, which also lets the other ranks go at the end.

    Args:
        target: Rank 0's part, loaded with `load_target(..., group=group)`.
        group: All ranks.
    """

    def __init__(self, target: MlxTarget, group: mx.distributed.Group) -> None:
        self._target = target
        self._wire = _Wire(group)
        self._n_made = 0
        self._dropped: list[int] = []
        self.model_type = target.model_type
        self.folder = target.folder
        self.vocab_size = target.vocab_size
        self.hidden_size = target.hidden_size
        self.n_layers = target.n_layers
        self.context_length = target.context_length
        self.tap_refusal = target.tap_refusal
        self.exact_refusal: str | None = (
            f"the sums between {group.size()} processes, whose rounding is not measured"
        )

    def make_cache(self) -> LeadCache:
        """A new, empty cache on every rank."""
        self._send(_Call.MAKE, self._n_made)
        cache = LeadCache(self._n_made, self._target.make_cache())
        weakref.finalize(cache, self._dropped.append, cache.id)
        self._n_made += 1
        return cache

    def prefill(
        self, tokens: Sequence[int], cache: LeadCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Append one chunk of the prompt on every rank."""
        self._send(_Call.PREFILL, cache.id, len(tokens), taps)
        shared = self._wire.share(mx.array(list(tokens), mx.int32))
        mx.eval(shared)
        output = self._target.prefill(tokens, cache.inner, taps=taps)
        mx.eval(output.logits)  # the other ranks compute them too
        return output

    def verify(
        self, block: mx.array, cache: LeadCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Forward a block on every rank and leave it open."""
        if not cache.is_open:  # otherwise refused below, before anybody hears of it
            self._send(_Call.VERIFY, cache.id, block.shape[0], taps)
            block = self._wire.share(block.astype(mx.int32))
        output = self._target.verify(block, cache.inner, taps=taps)
        mx.async_eval(output.logits)
        return output

    def commit(self, cache: LeadCache, n_keep: int) -> None:
        """Close the open block on every rank."""
        self._target.commit(cache.inner, n_keep)
        self._send(_Call.COMMIT, cache.id, n_keep)

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the raw table, which every rank holds whole."""
        return self._target.embed(tokens)

    def unembed(self, hidden: mx.array) -> mx.array:
        """The raw head; where it is split, `tap_refusal` says so."""
        return self._target.unembed(hidden)

    def stop(self) -> None:
        """Let the other ranks go."""
        self._send(_Call.STOP)

    def _send(
        self, call: _Call, cache_id: int = 0, count: int = 0, taps: Sequence[int] = ()
    ) -> None:
        if len(taps) > _MOST_TAPS:
            raise ValueError(f"[parallel] At most {_MOST_TAPS} taps travel, got {len(taps)}.")
        while self._dropped:
            self._wire.send(_Call.DROP, self._dropped.pop())
        self._wire.send(call, cache_id, count, taps)


@contextmanager
def lead(target: MlxTarget, group: mx.distributed.Group) -> Iterator[LeadTarget]:
    """Rank 0's side, for as long as the block lasts; the other ranks call `follow`.

    Args:
        target: Rank 0's part of the model.
        group: All ranks.

    Yields:
        A target for `spec_core.generate`.
    """
    whole = LeadTarget(target, group)
    try:
        yield whole
    finally:
        whole.stop()


@dataclass
class Followed:
    """What a rank did while it followed.

    Attributes:
        rows: Ids that each cache committed, by cache id.
    """

    rows: dict[int, list[int]] = field(default_factory=dict)


def follow(target: MlxTarget, group: mx.distributed.Group) -> Followed:
    """The other ranks' side: do what rank 0 does, until it stops.

    Args:
        target: This rank's part of the model.
        group: All ranks.
    """
    wire, caches, blocks, done = _Wire(group), {}, {}, Followed()
    while True:
        call, cache_id, count, taps = wire.receive()
        if call is _Call.STOP:
            return done
        if call is _Call.MAKE:
            caches[cache_id], done.rows[cache_id] = target.make_cache(), []
        elif call is _Call.PREFILL:
            tokens: Any = wire.share(mx.zeros((count,), mx.int32)).tolist()  # sync: ids
            mx.eval(target.prefill(tokens, caches[cache_id], taps=taps).logits)
            done.rows[cache_id] += tokens
        elif call is _Call.VERIFY:
            blocks[cache_id] = block = wire.share(mx.zeros((count,), mx.int32))
            mx.async_eval(target.verify(block, caches[cache_id], taps=taps).logits)
        elif call is _Call.COMMIT:
            target.commit(caches[cache_id], count)
            kept: Any = blocks.pop(cache_id)[:count].tolist()  # sync: already computed
            done.rows[cache_id] += kept
        elif call is _Call.DROP:
            del caches[cache_id]
