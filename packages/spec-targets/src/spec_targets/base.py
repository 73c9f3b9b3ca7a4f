"""An mlx-lm model behind the contract of spec-core: prefill, verify, commit, embed, unembed.

Knows nothing about drafts or sampling. A model family says where its parts are (`families`), a
cache entry says how it rolls back (`rollback`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from spec_core import LoadError, StateError, TargetOutput
from spec_kernels import Installed
from spec_targets import batching
from spec_targets.batching import BatchCache
from spec_targets.compiled import CompiledForward
from spec_targets.exactness import find_inexact_op, find_inexact_width
from spec_targets.families import Family
from spec_targets.forward import Forward, close, tap_refusal
from spec_targets.prompts import most_prompt_ids, prefill_rows
from spec_targets.quantised import check_kv_bits, group_size_for, pack_entry, refuse_unreadable
from spec_targets.replayed import HeldAlone, WholeRows
from spec_targets.rollback import Rollback, replace_entry, rollback_for
from spec_targets.single import race_single
from spec_targets.snapshot import FrozenCache, Rung, freeze_entry, take_rung

_LARGE = 256  # ids of a chunk whose buffers are given back; new ones cost a CUDA device time
_PROBE_IDS = (1, 2, 3)


@dataclass(slots=True)
class TargetCache:
    """One sequence's state: the model's cache entries and how each rolls back.

    A forward that did not come to its end, after an error or Ctrl-C, leaves some layers ahead of
    others: the cache is torn, and refuses to go on.
    """

    entries: list[Any]
    rollbacks: list[Rollback]
    offset: int = 0
    n_open: int = 0
    torn: bool = False

    @property
    def is_open(self) -> bool:
        """True between `verify` and `commit`."""
        return self.n_open > 0

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(entry.nbytes for entry in self.entries)


class MlxTarget:
    """A loaded mlx-lm model as target.

    Args:
        model: An mlx-lm model in evaluation mode.
        family: Where its parts are.
        model_type: The checkpoint's `model_type`, for messages.
        context_length: Most positions the model was made for, or None.
        n_heads: Query heads of an attention layer, for the exactness probe.
        kv_bits: Hold growing keys and values in 4 or 8 bits, from the first token; None for the
            model's own type.

    Raises:
        LoadError: the family does not reproduce the model's own logits, a cache entry cannot be
            rolled back, or its attention cannot read packed keys.
        ValueError: kv_bits is neither 4 nor 8.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        model_type: str,
        context_length: int | None = None,
        n_heads: int = 1,
        kv_bits: int | None = None,
    ) -> None:
        if kv_bits is not None:
            check_kv_bits(kv_bits)
        self.model = model
        self.model_type = model_type
        self.context_length = context_length
        self.kv_bits: int | None = None
        self.kernels: Installed | None = None  # see use_kernels
        self._compiled: CompiledForward | None = None
        self.folder: Path | None = None  # of the checkpoint; set by load_target
        # Loads another checkpoint with the same wishes about kernels; set by load_target.
        self.open_beside: Callable[[Path], tuple[Any, Any]] | None = None
        self._kv_group_size = 0
        self._family = family
        self._n_heads = n_heads
        self._embedding: Any = family.embedding(model)
        ids = mx.array(_PROBE_IDS, mx.int32)
        own = model(ids[None], cache=make_prompt_cache(model))[0]  # (T, V), before any change
        mx.eval(own)
        family.prepare(model)
        self._forward = Forward(model, family)
        self.n_layers = self._forward.taps.n_layers
        self.hidden_size = self.embed(ids).shape[-1]
        self.vocab_size = own.shape[-1]
        entries = self.make_cache().entries
        self.tap_refusal = self._probe(ids, own, entries)
        if kv_bits is not None:
            self._kv_group_size = group_size_for(entries, model_type)
            self.kv_bits = kv_bits
            refuse_unreadable(model, self.make_cache().entries, ids, model_type)
        self._began = 0.0  # when the open block was forwarded
        self._exact: tuple[str | None] | None = None
        self._batch: tuple[str | None] | None = None
        self._whole: WholeRows | None = None

    def use_kernels(self, kernels: Installed, *, replay: bool = True) -> None:
        """Serve with what has been installed in the model.

        Kernels and graphs hold the weights of now: install and call this again after a change. On
        CUDA, and with `replay`, whole forwards of one row have the last word on attention of one
        query: see `race_single`.

        Args:
            kernels: What `spec_kernels.install` returned.
            replay: Let blocks become compiled graphs. Not for one part of a split model: each
                process would decide by its own races when to try one, and a trial is two forwards,
                for whose sums the other processes would have to wait.
        """
        self.kernels = kernels
        if replay:
            entries, depth = self.make_cache().entries, self.context_length
            race_single(self._forward, entries, kernels, self.model_type, depth)
        self._compiled = CompiledForward(kernels) if replay else None
        self._whole = WholeRows(self._forward, kernels, self._compiled)
        self._batch = None  # to be tried with these kernels

    @property
    def replayed_rows(self) -> frozenset[int]:
        """Block lengths that are replayed as graphs now; none without kernels."""
        return self._compiled.rows if self._compiled is not None else frozenset()

    @property
    def exact_refusal(self) -> str | None:
        """The op whose rows depend on their number, or None; measured at the first use."""
        if self._exact is None:
            refusal = None
            if self.max_block is None:  # exact kernels stand in for the layers' own operations
                cache = self.make_cache()
                self.prefill(_PROBE_IDS, cache)
                refusal = find_inexact_op(self.model, cache.entries, self._n_heads)
            self._exact = (refusal or find_inexact_width(self, self.max_block),)
        return self._exact[0]

    @property
    def max_block(self) -> int | None:
        """Most rows of a verify; None for no limit. Exact kernels serve so many and no more."""
        return self.kernels.max_rows if self.kernels is not None else None

    def make_cache(self) -> TargetCache:
        """A new, empty cache."""
        entries = [replace_entry(entry) for entry in make_prompt_cache(self.model)]
        if self.kv_bits is not None:
            entries = [pack_entry(entry, self.kv_bits, self._kv_group_size) for entry in entries]
        rollbacks = [rollback_for(e, layer, self.model_type) for layer, e in enumerate(entries)]
        return TargetCache(entries, rollbacks)

    def prefill(
        self, tokens: Sequence[int], cache: TargetCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Append one chunk of the prompt; only its last row meets the head."""
        if cache.is_open:
            raise StateError("[prefill] The open block must be committed first.")
        _refuse_torn(cache, "prefill")
        cache.torn = True
        done = self._forward(mx.array(list(tokens), mx.int32), cache.entries, taps, last_only=True)
        mx.eval([entry.state for entry in cache.entries], done.taps)
        cache.offset += len(tokens)
        cache.torn = False
        if len(tokens) >= _LARGE:  # its buffers fit nothing that follows
            mx.clear_cache()
        return TargetOutput(done.logits, done.taps)  # logits (1, V), lazy

    def verify(
        self, block: mx.array, cache: TargetCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Forward a block and leave it open."""
        if cache.is_open:
            raise StateError(f"[verify] A block of {cache.n_open} rows is open. Call commit first.")
        _refuse_torn(cache, "verify")
        most = self.max_block
        if most is not None and block.shape[0] > most:
            raise ValueError(
                f"[verify] A block must have at most {most} rows in exact mode, got "
                f"{block.shape[0]}. Draft at most {most - 1} tokens."
            )
        cache.torn = True
        for rollback in cache.rollbacks:
            rollback.open()
        output = None
        if self._compiled is not None:
            output = self._compiled(block, HeldAlone(self._forward, cache.entries), taps)
        if output is None:
            done = self._forward(block, cache.entries, taps)
            output = TargetOutput(done.logits, done.taps)
        cache.n_open = block.shape[0]
        cache.torn = False
        self._began = time.perf_counter()
        return output

    def commit(self, cache: TargetCache, n_keep: int) -> None:
        """Close the open block and keep its first `n_keep` rows."""
        n_rows = cache.n_open
        if n_rows == 0:
            raise StateError("[commit] No block is open. Call verify first.")
        if not 0 <= n_keep <= n_rows:
            raise ValueError(
                f"[commit] n_keep must be 0..{n_rows} for the open block of {n_rows} rows, "
                f"got {n_keep}."
            )
        for rollback in cache.rollbacks:
            rollback.keep(n_rows, n_keep)
        cache.offset += n_keep
        cache.n_open = 0
        self._watch(n_rows)

    # -- states to come back to ------------------------------------------------------------------

    def freeze(self, cache: TargetCache) -> FrozenCache | None:
        """A copy of a closed cache to go on from later; None for kinds that cannot be copied."""
        if cache.is_open:
            raise StateError("[freeze] The open block must be committed first.")
        _refuse_torn(cache, "freeze")
        frozen = [freeze_entry(entry, cache.offset) for entry in cache.entries]
        entries = tuple(entry for entry in frozen if entry is not None)
        if len(entries) < len(frozen):
            return None
        copy = FrozenCache(entries, cache.offset)
        mx.eval(copy.arrays())
        return copy

    def rung(self, cache: TargetCache) -> Rung | None:
        """What lets a longer frozen cache go back to where this closed one is.

        None where it can go back anyhow (keys and values alone), or never.
        """
        if cache.is_open:
            raise StateError("[rung] The open block must be committed first.")
        _refuse_torn(cache, "rung")
        rung = take_rung(cache.entries, cache.offset)
        if rung is not None:
            mx.eval([array for entry in rung if entry is not None for array in entry.leaves()])
        return rung

    def thaw(self, frozen: FrozenCache, n: int) -> TargetCache:
        """A live cache that goes on from the first `n` tokens; `frozen.reach(n)` must be n.

        Raises:
            ValueError: the state cannot go on from there.
        """
        if not 0 < n <= frozen.offset or frozen.reach(n) != n:
            raise ValueError(f"[thaw] n must be a length within reach, got {n}.")
        entries = [entry.thaw(n) for entry in frozen.at(n)]
        mx.eval([entry.state for entry in entries])
        rollbacks = [rollback_for(e, layer, self.model_type) for layer, e in enumerate(entries)]
        return TargetCache(entries, rollbacks, n)

    # -- several sequences -----------------------------------------------------------------------

    @property
    def batch_refusal(self) -> str | None:
        """None when sequences can share a forward, else the reason; tried at the first use."""
        if self._batch is None:
            refusal = batching.find_batch_refusal(self)
            if refusal is not None and self._whole is not None and self._whole.serves:
                self._whole.serves = False  # a layer may read another's keys, which must be cut
                refusal = batching.find_batch_refusal(self)
            self._batch = (refusal,)
        return self._batch[0]

    @property
    def most_prompt_ids(self) -> int:
        """Most ids of a prompt that is forwarded with others: none but where batches are padded."""
        if self.batch_refusal is not None or not self._pads:
            return 0
        return most_prompt_ids(self.make_cache().entries)

    def prefill_rows(
        self,
        prompts: Sequence[Sequence[int]],
        caches: Sequence[TargetCache],
        *,
        taps: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """Forward whole prompts on new caches; the caches and logits are evaluated.

        Raises:
            ValueError: a prompt is longer than `most_prompt_ids`, or a cache is not new.
        """
        if any(cache.offset or cache.is_open or cache.torn for cache in caches):
            raise ValueError("[prefill] Prompts forwarded together need new caches.")
        outputs = prefill_rows(self._forward, prompts, [c.entries for c in caches], taps)
        for prompt, cache in zip(prompts, caches, strict=True):
            cache.offset = len(prompt)
        return outputs

    def join(self, caches: Sequence[Any]) -> BatchCache:
        """One batch cache of single and batch caches, rows in order; the parts are consumed."""
        return batching.join(caches, padded=self._pads)

    def select(self, cache: BatchCache, rows: Sequence[int]) -> BatchCache:
        """The batch cache cut to some rows, in this order."""
        return batching.select(cache, rows)

    def extract(self, cache: BatchCache, row: int) -> TargetCache:
        """A single cache that goes on with one row."""
        offset = cache.offsets[row]
        entries = [entry.row(cache.places[row], offset) for entry in cache.entries]
        mx.eval([entry.state for entry in entries])
        rollbacks = [rollback_for(e, layer, self.model_type) for layer, e in enumerate(entries)]
        return TargetCache(entries, rollbacks, offset)

    def verify_rows(
        self, blocks: mx.array, cache: BatchCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Forward blocks (B, T) and leave them open: logits (B, T, V), taps (B, T, H)."""
        spread = cache.spread(blocks)
        output = self._whole(spread, cache, taps) if self._whole is not None else None
        if output is None:
            output = batching.verify_rows(self._forward.rows, spread, cache, taps)
        self._began = time.perf_counter()
        return cache.gathered(output)

    def commit_rows(self, cache: BatchCache, n_keep: Sequence[int]) -> None:
        """Close the blocks; row b keeps its first `n_keep[b]` positions."""
        n_rows = cache.n_open
        batching.commit_rows(cache, n_keep)
        self._watch(n_rows)

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the raw table: (T,) -> (T, H)."""
        return self._embedding(tokens)

    def unembed(self, hidden: mx.array) -> mx.array:
        """The raw head: (T, H) -> (T, V)."""
        return self._family.raw_head(self.model, hidden)

    @property
    def _pads(self) -> bool:
        """Whether each number of sequences is another shape to the device."""
        return self._whole is not None and self._whole.pads

    def _watch(self, n_rows: int) -> None:
        """Tell the kernels' watchdog how long a block took from its forward to its commit.

        A step of one row is left out: it may have waited for whoever reads the text.
        """
        if self.kernels is not None and n_rows > 1:
            self.kernels.observe(time.perf_counter() - self._began)

    def _probe(self, ids: mx.array, own: mx.array, entries: list[Any]) -> str | None:
        """Compare the watched model with what it said on a tiny input before it was watched.

        Returns:
            Why layers cannot be tapped, or None.
        """
        done, trace, final = self._forward.probe(ids, entries)
        if not close(done.logits, own):
            raise LoadError(
                f'[targets] Family "{self.model_type}" must reproduce the model\'s own logits on a '
                "tiny input, and does not. This checkpoint needs another mlx-lm version."
            )
        return tap_refusal(done, trace, final, self.unembed)


def _refuse_torn(cache: TargetCache, where: str) -> None:
    if cache.torn:
        raise StateError(
            f"[{where}] The cache must come from forwards that ended, got one that an error or an "
            "interrupt tore. Drop it and start from a new one."
        )
