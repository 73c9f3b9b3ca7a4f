"""EAGLE-3: one layer that drafts token by token, feeding its own hidden state back.

Taps are fused once; the state of position i is paired with the token at i + 1, and the pair's
output predicts the token after that. The newest state waits for the anchor, so a draft begins by
pairing the two. Chain drafting only, no trees. Knows nothing about the model behind.

References:
    EAGLE-3: Li et al. 2025, arXiv:2503.01840.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, Target, TargetOutput, target_probs
from spec_core.sampling import draw
from spec_drafters._checkpoint import Checkpoint, open_checkpoint
from spec_drafters._context import ContextCache, ContextState
from spec_drafters._eagle_config import EagleConfig, is_eagle3, read_eagle
from spec_drafters._eagle_layer import EagleLayer, PairRows, load_eagle_layer
from spec_drafters._fit import check_taps, rounded_to_bf16
from spec_drafters._linear import Matrix
from spec_drafters._vocab import (
    DraftVocab,
    OutputHead,
    check_width,
    chosen_of,
    or_none,
    soft_capped,
)
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class EagleState:
    """A snapshot: the cache of pairs, and the state that waits for its token."""

    context: ContextState
    waiting: mx.array | None


class Eagle3Drafter:
    """An EAGLE-3 head beside its target.

    Args:
        checkpoint: An opened checkpoint.
        target: The model it drafts for.
        bits: 4 or 8 quantises linears and embeddings at load; 16 computes with plain matrices.
        max_draft: Drafts a round; what the checkpoint promises without.
        truncate: Draw from the request's top-k, top-p and min-p too, not from temperature alone.
        dtype: Compute type; the target's without.

    Raises:
        LoadError: the checkpoint is no EAGLE-3 head, or does not fit the target.
    """

    name = "eagle3"

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        bits: int = 4,
        max_draft: int | None = None,
        truncate: bool = True,
        dtype: mx.Dtype | None = None,
    ) -> None:
        if not is_eagle3(checkpoint.config, checkpoint.shapes):
            raise LoadError(
                "[eagle3] The checkpoint must hold an EAGLE-3 head, got another one. "
                "Load it with load_drafter."
            )
        config = read_eagle(checkpoint.config, checkpoint.shapes, target.n_layers)
        _check_fit(config, target)
        dtype = dtype or target.embed(mx.array([0], mx.int32)).dtype
        weights = checkpoint.weights("eagle3", bits, dtype)
        self.config = config
        self.taps = config.taps
        self.max_draft = max_draft or config.n_drafts
        self._target = target
        self._dtype = dtype
        self._truncate = truncate
        self._take(weights, target)
        self.report = weights.finish()
        self._context = ContextCache(config.window, n_block=0)
        self._waiting: mx.array | None = None  # (1, H): the newest state, its token unknown
        self._unflushed = False

    @classmethod
    def load(cls, path: Path | str, target: Target, **options: object) -> "Eagle3Drafter":
        """Open a checkpoint folder; options as the constructor takes them."""
        return cls(open_checkpoint(path), target, **options)  # pyright: ignore[reportArgumentType]

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Pair the newest state with the anchor, then go on from the layer's own states."""
        assert self._waiting is not None, "observe comes before draft"
        self._unflushed = False
        n_drafts = min(cap, self.max_draft)
        settings = sampling
        if not self._truncate:
            settings = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        pairs = PairRows(self._layer, self._context)
        hidden, token = self._waiting, mx.array([anchor], mx.int32)
        tokens: list[mx.array] = []
        rows: list[mx.array] = []
        chosen_by: list[mx.array] = []
        for step_key in mx.random.split(key, n_drafts):
            output = pairs.feed(self._embed(token), hidden)
            normed = mx.fast.rms_norm(output, self._norm, self.config.eps)
            logits = soft_capped(self._output(normed), self.config.softcap)  # (1, Vd)
            hidden = normed if self.config.norm_output else output
            if sampling.greedy:
                drafted = mx.argmax(logits, axis=-1)
            else:
                rows.append(target_probs(logits, settings))
                drafted = draw(rows[-1], step_key)
            chosen_by.append(chosen_of(rows[-1] if rows else logits, drafted))
            token = self._vocab.to_target(drafted.astype(mx.int32))
            tokens.append(token)
        drafts = or_none(mx.concatenate(tokens), mx.concatenate(chosen_by))
        probs = self._vocab.spread(mx.concatenate(rows)) if rows else None
        return Draft(drafts, probs, source=self.name)

    def observe(self, tokens: Sequence[int], output: TargetOutput) -> None:
        """Pair each state with the token that followed it; enqueues, waits for nothing."""
        states = self._fuse(output.taps)  # (M, H)
        ids = list(tokens)
        if self._waiting is None:
            ids = ids[1:]
            paired = states[:-1]
        else:
            paired = mx.concatenate([self._waiting, states[:-1]])
        self._waiting = states[-1:]
        if self._unflushed:
            mx.async_eval(self._context.arrays)
        if not ids:
            mx.async_eval(self._waiting)
            return
        embedded = self._embed(mx.array(ids, mx.int32))
        keys, values = self._layer.keys_values(
            self._layer.inputs(embedded, paired), self._context.n_rows
        )
        # As in the block body: rows now, the write into the buffer with the next draft.
        mx.async_eval(keys, values, self._waiting)
        self._context.append(keys, values)
        self._unflushed = True

    def fork(self) -> "Eagle3Drafter":
        """Another drafter on the same weights, with an empty context."""
        other = copy.copy(self)
        other._context = self._context.fork()
        other._waiting, other._unflushed = None, False
        return other

    def reset(self) -> None:
        """Forget the context."""
        self._context.reset()
        self._waiting, self._unflushed = None, False

    def state(self) -> EagleState:
        """A snapshot of the context."""
        return EagleState(self._context.state(), self._waiting)

    def restore(self, state: EagleState) -> None:
        """Go on from a snapshot."""
        self._context.restore(state.context)
        self._waiting = state.waiting

    def _take(self, weights: Weights, target: Target) -> None:
        """Take every tensor of the head."""
        config, width = self.config, self.config.hidden_size
        n_taps = len(config.taps)
        self._embedding: Matrix | None = None
        if weights.has("embed_tokens.weight"):
            self._embedding = weights.matrix("embed_tokens", target.vocab_size, width)
        else:
            weights.leave("embed_tokens")
            check_width("eagle3", "embed_tokens", width, target)
        self._fc = weights.matrix("fc", width, n_taps * target.hidden_size)
        self._tap_norms: list[mx.array] = []
        self._joint_norm: mx.array | None = None
        if config.fc_norm:
            for j in range(n_taps):
                self._tap_norms.append(weights.array(f"fc_norm.{j}.weight", (target.hidden_size,)))
        if config.norm_before_fc:
            n_in = n_taps * target.hidden_size
            self._joint_norm = weights.array("input_norm.weight", (n_in,))
        self._layer: EagleLayer = load_eagle_layer(weights, config)
        self._norm = weights.array("norm.weight", (width,))
        full = weights.has("lm_head.weight") and weights.matrix_shape("lm_head")[0]
        if full == target.vocab_size and weights.has("d2t"):
            weights.ignore("d2t")  # written all the same by some exporters; maps nothing
        self._output = OutputHead(weights, target, width)
        self._vocab: DraftVocab = self._output.vocab
        self._scale = rounded_to_bf16(config.embed_scale) if config.gemma else 1.0

    def _embed(self, ids: mx.array) -> mx.array:
        table = self._embedding
        rows = self._target.embed(ids) if table is None else table.lookup(ids)
        rows = rows.astype(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale

    def _fuse(self, taps: Sequence[mx.array]) -> mx.array:
        """Taps of M rows as drafter states: n x (M, H_target) -> (M, H)."""
        eps = self.config.eps
        parts = [tap.astype(self._dtype) for tap in taps]
        if self._tap_norms:
            norms = zip(parts, self._tap_norms, strict=True)
            parts = [mx.fast.rms_norm(part, norm, eps) for part, norm in norms]
        joint = mx.concatenate(parts, axis=-1)
        if self._joint_norm is not None:
            joint = mx.fast.rms_norm(joint, self._joint_norm, eps)
        return self._fc(joint)


def _check_fit(config: EagleConfig, target: Target) -> None:
    check_taps("eagle3", config.taps, config.n_target_layers, target)
    if config.vocab_size is not None and config.vocab_size != target.vocab_size:
        raise LoadError(
            f"[eagle3] Drafter and target must share a vocabulary, got {config.vocab_size} and "
            f"{target.vocab_size} tokens. Use the drafter made for this target."
        )
