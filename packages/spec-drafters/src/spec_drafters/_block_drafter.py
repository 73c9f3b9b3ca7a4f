"""What DSpark, DFlash and DFlash 2 share as drafters: loading, context, the block's forward."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self, cast

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, Target, TargetOutput
from spec_core.protocols import DraftAsk, Observation
from spec_drafters._blocks import BlockBody, check_fit
from spec_drafters._checkpoint import Checkpoint, open_checkpoint, read_head
from spec_drafters._context import BodyState, ContextBody
from spec_drafters._head import Family
from spec_drafters._layers import rows_to_compute
from spec_drafters._vocab import OutputHead
from spec_drafters._weights import WeightReport, Weights


class ContextDrafter:
    """A drafter whose only memory is its body's context, and how it draws."""

    name: str
    report: WeightReport
    _body: ContextBody
    _truncate: bool

    @classmethod
    def load(cls, path: Path | str, target: Target, **options: object) -> Self:
        """Open a checkpoint folder; options as the constructor takes them."""
        return cls(open_checkpoint(path), target, **options)  # pyright: ignore[reportCallIssue]

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Append the taps of committed rows to the context; enqueues, waits for nothing."""
        self._body.observe(output.taps)

    def fork(self) -> Self:
        """Another drafter on the same weights, with an empty context."""
        other = copy.copy(self)
        other._body = self._body.fork()
        return other

    def reset(self) -> None:
        """Forget the context."""
        self._body.reset()

    def state(self) -> BodyState:
        """A snapshot of the context."""
        return self._body.state()

    def shortened(self, state: BodyState, n_rows: int) -> BodyState | None:
        """A snapshot as it was after its first rows; None where the window has moved on."""
        return self._body.shortened(state, n_rows)

    def restore(self, state: BodyState) -> None:
        """Go on from a snapshot."""
        self._body.restore(state)

    def _settings(self, sampling: Sampling) -> Sampling:
        """What drafts are drawn with: the request's settings, or its temperature alone."""
        if self._truncate:
            return sampling
        return replace(sampling, top_k=0, top_p=1.0, min_p=0.0)


class BlockDrafter(ContextDrafter):
    """A block head beside its target; a family adds its `draft`.

    Forks draft together (`DraftsTogether`) where the family adds `_greedy_rows` and a `kin`.

    Args:
        checkpoint: An opened checkpoint.
        target: The model it drafts for.
        bits: 4 or 8 quantises linears and embeddings at load, where they are not packed already; 16
            computes with plain matrices.
        window: Context rows that a bidirectional head sees, the newest; 0 for all.
        truncate: Draw from the request's top-k, top-p and min-p too, not from temperature alone.
        embed_scale: The factor that the target itself applies to embedding rows (gemma: the root of
            its width); for heads that borrow the table and were trained on scaled rows.
        dtype: Compute type; the target's without.

    Raises:
        LoadError: the checkpoint is of another family, or does not fit the target.
    """

    family: ClassVar[Family]

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        bits: int = 4,
        window: int = 4096,
        truncate: bool = True,
        embed_scale: float = 1.0,
        dtype: mx.Dtype | None = None,
    ) -> None:
        head = read_head(checkpoint, target)
        head = replace(head, embed_scale=head.embed_scale * embed_scale)
        if head.family != self.family:
            raise LoadError(
                f'[{self.family}] The checkpoint must hold a "{self.family}" head, got '
                f'"{head.family}". Load it as "{head.family}", or with load_drafter.'
            )
        check_fit(head, target)
        dtype = dtype or target.embed(mx.array([0], mx.int32)).dtype
        weights = checkpoint.weights(self.family, bits, dtype)
        self.head = head
        self._truncate = truncate
        self._body = BlockBody(head, weights, target, window=window)
        self._output = OutputHead(weights, target, head.backbone.hidden_size)
        self._take_extras(weights, target)
        self.report = weights.finish()

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it observes."""
        return self.head.taps

    @property
    def max_draft(self) -> int:
        """K, drafts of a whole block."""
        return self.head.n_drafts

    @property
    def kin(self) -> object | None:
        """What drafters that draft together share; None for one that drafts alone."""
        return None

    def draft_together(self, asks: Sequence[DraftAsk]) -> list[Draft | None]:
        """Greedy drafts of forks of one drafter: one forward over all their blocks.

        Every block is as wide as the largest cap asks, and each draft is cut: what a slot drafts
        depends on no later slot, unless the head looks both ways and the width is fixed anyway.
        """
        caps = [min(ask.cap, self.max_draft) for ask in asks]
        every = [*asks, *[asks[-1]] * (rows_to_compute(len(asks)) - len(asks))]
        bodies = [cast(Self, ask.drafter)._body for ask in every]
        anchors = [ask.anchor for ask in every]
        n_drafts, first = max(caps), self.head.logits_start
        n_rows = self._n_rows(n_drafts)
        rows = self._body.hidden_together(bodies, anchors, n_rows)
        rows = rows.reshape(len(every), n_rows, -1)[:, first : first + n_drafts]  # (R, K, H)
        hidden = rows.swapaxes(0, 1).flatten(0, 1)  # (K * R, H), slot by slot
        tokens, confidence = self._greedy_rows(anchors, hidden)
        tokens = tokens.reshape(n_drafts, -1).T  # (R, K)
        sure = None if confidence is None else confidence.reshape(n_drafts, -1).T
        return [
            Draft(tokens[i, :n], None, None if sure is None else sure[i, :n], self.name)
            for i, n in enumerate(caps)
        ]

    def observe_together(self, observations: Sequence[Observation]) -> None:
        """Append the committed rows of forks of one drafter; their taps are projected together."""
        bodies = [cast(Self, one.drafter)._body for one in observations]
        self._body.observe_together(bodies, [one.output.taps for one in observations])

    def _greedy_rows(
        self, anchors: Sequence[int], hidden: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Target ids and confidence of K slots of R drafts, (K * R,) each, slot by slot.

        Args:
            anchors: R of them.
            hidden: Final rows of slot 0 of all drafts, then of slot 1, ..., shape (K * R, H).
        """
        raise NotImplementedError

    def _take_extras(self, weights: Weights, target: Target) -> None:
        """Take the tensors that only this family has."""

    def _hidden(self, anchor: int, n_drafts: int) -> mx.array:
        """Final rows of the first n_drafts slots, (n_drafts, H).

        A bidirectional block always runs at its trained width: a narrower one is another
        distribution. A causal block may end early.
        """
        first = self.head.logits_start
        return self._body.hidden(anchor, self._n_rows(n_drafts))[first : first + n_drafts]

    def _n_rows(self, n_drafts: int) -> int:
        head = self.head
        causal = all(view.causal for view in head.backbone.views)
        return head.logits_start + n_drafts if causal else head.block_size
