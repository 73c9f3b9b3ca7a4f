"""What DSpark, DFlash and DFlash 2 share as drafters: loading, context, the block's forward."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import mlx.core as mx

from spec_core import LoadError, Sampling, Target, TargetOutput
from spec_drafters._blocks import BlockBody, check_fit
from spec_drafters._checkpoint import Checkpoint, open_checkpoint, read_head
from spec_drafters._context import BodyState, ContextBody
from spec_drafters._head import Family
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

    def _take_extras(self, weights: Weights, target: Target) -> None:
        """Take the tensors that only this family has."""

    def _hidden(self, anchor: int, n_drafts: int) -> mx.array:
        """Final rows of the first n_drafts slots, (n_drafts, H).

        A bidirectional block always runs at its trained width: a narrower one is another
        distribution. A causal block may end early.
        """
        head = self.head
        causal = all(view.causal for view in head.backbone.views)
        n_rows = head.logits_start + n_drafts if causal else head.block_size
        rows = self._body.hidden(anchor, n_rows)
        return rows[head.logits_start : head.logits_start + n_drafts]
