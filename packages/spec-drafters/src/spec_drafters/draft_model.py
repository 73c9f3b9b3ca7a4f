"""A small model as drafter: the classic arrangement, for any two targets with one vocabulary.

Works on the contract of a target alone, so it needs no model library. A target cannot forget a
committed row, and a draft must leave no trace; so each step forwards the drafts so far as one open
block and abandons it. That costs a few extra rows, which ride along with the weights, and works for
models whose state cannot be trimmed. The tables of one vocabulary may be padded to different sizes.

References:
    Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, Target, TargetOutput, registry, target_probs
from spec_core.sampling import draw
from spec_drafters._files import locate
from spec_drafters._vocab import chosen_of, or_none
from spec_drafters._vocabulary import (
    check_same_vocabulary,
    target_vocabulary,
    vocabulary_file,
)

_CHUNK = 512  # rows of one prefill
_NOTHING = mx.array([], mx.int32)  # data, so any thread may read it


class DraftModelDrafter:
    """Any target as drafter of another. Where its context ends it proposes nothing more.

    What it has read of one sequence serves the next one as far as the two begin alike.

    Args:
        model: The small model. An id means the same to both (`load` compares them); ids that only
            the wider of the two tables has are padding, or tokens the other one never saw.
        target: The model it drafts for.
        max_draft: Drafts a round.
        truncate: Draw from the request's top-k, top-p and min-p too, not from temperature alone.

    Raises:
        ValueError: max_draft is below 1.
    """

    name = "draft-model"
    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Target, target: Target, *, max_draft: int = 4, truncate: bool = True
    ) -> None:
        if max_draft < 1:
            raise ValueError(f"[draft-model] max_draft must be >= 1, got {max_draft}.")
        self.max_draft = max_draft
        self._model = model
        self._vocab_size = target.vocab_size
        self._truncate = truncate
        self._fed: list[int] = []  # ids in the small model's cache
        self._before: tuple[list[int], Any] | None = None  # those of the sequence before, its cache
        self._drafting = False  # stays set where a forward broke off
        self.reset()

    @classmethod
    def load(
        cls,
        path: Path | str,
        target: Target,
        *,
        model: Path | str | None = None,
        open_target: Callable[[Path], tuple[Target, Any]] | None = None,
        **options: Any,
    ) -> "DraftModelDrafter":
        """Open a small model's folder and check its vocabulary string by string.

        Args:
            path: Folder or hub id of the small model.
            target: The model it drafts for.
            model: Folder or hub id of the target, for its vocabulary; not needed where the target
                says in `folder` what it was loaded from.
            open_target: Loader of models; without, the target's own `open_beside`, which keeps its
                settings, else the installed one.
            options: As the constructor takes them.

        Raises:
            LoadError: no loader is installed, or an id stands for two strings, or the target's
                vocabulary is not known.
        """
        folder, known = locate(path), target_vocabulary(target, model)
        if known is None:
            raise LoadError(
                "[draft-model] The vocabularies must be compared, and the target's is not known. "
                "Name its folder or hub id as model."
            )
        check_same_vocabulary(vocabulary_file(folder), known)
        if open_target is None:
            open_target = getattr(target, "open_beside", None)
        if open_target is None:
            open_target = registry.load(registry.LOADERS, "target")
        small, _ = open_target(folder)  # pyright: ignore[reportOptionalCall]
        room, wanted = small.context_length, target.context_length
        if room is not None and (wanted is None or room < wanted):
            warnings.warn(
                f'[draft-model] "{folder.name}" drafts in the first {room} tokens of a text, where '
                f"its context ends; the target's has {wanted or 'no limit'}. Text beyond is "
                "decoded plainly.",
                RuntimeWarning,
                stacklevel=2,
            )
        return cls(small, target, **options)

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward the anchor and the drafts so far, again and one row longer, cap times."""
        n_drafts = min(cap, self.max_draft, self._room())
        if n_drafts < 1:
            return Draft(_NOTHING, source=self.name)
        if self._drafting:  # a draft has broken off: the cache holds anything
            self.restore(self.state())
        self._drafting = True
        self._go_on()
        self._catch_up()
        settings = sampling
        if not self._truncate:
            settings = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        block = mx.array(self._known([*self._waiting, anchor]), mx.int32)
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        chosen_by: list[mx.array] = []
        for step_key in mx.random.split(key, n_drafts):
            output = self._model.verify(block, self._cache)
            # Committed rows stay; the anchor is the loop's to commit, the drafts are guesses.
            self._model.commit(self._cache, len(self._waiting))
            self._fed += self._waiting
            block = block[len(self._waiting) :]
            self._waiting = []
            logits = output.logits[-1:, : self._vocab_size]
            if sampling.greedy:
                drafted = mx.argmax(logits, axis=-1).astype(mx.int32)
            else:
                rows.append(target_probs(logits, settings))
                drafted = draw(rows[-1], step_key)
            tokens.append(drafted)
            chosen_by.append(chosen_of(rows[-1] if rows else logits, drafted))
            block = mx.concatenate([block, drafted])
        self._drafting = False
        probs = self._widened(mx.concatenate(rows)) if rows else None
        drafts = or_none(mx.concatenate(tokens), mx.concatenate(chosen_by))
        return Draft(drafts, probs, source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Remember committed ids; the next draft forwards them."""
        self._waiting.extend(tokens)

    def fork(self) -> Self:
        """Another drafter on the same model, with an empty context."""
        other = copy.copy(self)
        other._fed, other._before, other._drafting = [], None, False
        other.reset()
        return other

    def reset(self) -> None:
        """Forget the sequence."""
        if self._drafting:
            self._before, self._drafting = None, False
        elif self._fed:
            self._before = self._fed, self._cache
        self._cache = self._model.make_cache()
        self._fed = []
        self._waiting: list[int] = []  # committed ids that are not in the cache

    def state(self) -> tuple[int, ...]:
        """The committed ids."""
        return (*self._fed, *self._waiting)

    def restore(self, state: tuple[int, ...]) -> None:
        """Go on from a snapshot; keeps the cache where it holds a prefix of it."""
        n_fed = len(self._fed)
        if self._drafting or list(state[:n_fed]) != self._fed:
            self.reset()
            n_fed = 0
        self._waiting = list(state[n_fed:])

    def _go_on(self) -> None:
        """Take over what the cache of the sequence before holds of this one's beginning."""
        before, self._before = self._before, None
        if before is None or self._fed:
            return
        fed, cache = before
        same = (a == b for a, b in zip(fed, self._waiting, strict=False))
        n = sum(1 for _ in takewhile(bool, same))
        if n < len(fed):
            n, cache = self._shortened(cache, n)
        if n:
            self._cache, self._fed, self._waiting = cache, self._waiting[:n], self._waiting[n:]

    def _shortened(self, cache: Any, n: int) -> tuple[int, Any]:
        """A cache at the greatest length up to n that it can go back to; 0 where it cannot."""
        model: Any = self._model
        frozen = model.freeze(cache) if n and hasattr(model, "freeze") else None
        n = frozen.reach(n) if frozen is not None else 0
        return (n, model.thaw(frozen, n)) if n else (0, None)

    def _catch_up(self) -> None:
        """Prefill what waits, down to the rows that one block can take along."""
        while len(self._waiting) > _CHUNK:
            chunk = self._waiting[:_CHUNK]
            self._model.prefill(self._known(chunk), self._cache)
            self._fed += chunk
            self._waiting = self._waiting[_CHUNK:]

    def _room(self) -> int:
        """Drafts that the small model's context has room for, behind the anchor."""
        context = self._model.context_length
        if context is None:
            return self.max_draft
        return context - len(self._fed) - len(self._waiting)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids with those that the small model has no row for as its last one."""
        last = self._model.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _widened(self, probs: mx.array) -> mx.array:
        """Rows over the target's vocabulary, zero where the small model has no token: (K, V)."""
        missing = self._vocab_size - probs.shape[-1]
        return mx.pad(probs, [(0, 0), (0, missing)]) if missing else probs
