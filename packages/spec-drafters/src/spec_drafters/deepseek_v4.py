"""DSpark as DeepSeek-V4 and V4.1 bring it: draft stages inside the target's own checkpoint.

Reads the target through its taps (the mean over the copies of its residual stream), its raw
embedding table and its raw head. Of a checkpoint in many files only those with draft stages are
opened, and their FP8 and FP4 matrices stay packed.

References:
    DeepSeek-V4 and V4.1, `mtp.*` of the released checkpoints. Losslessness: arXiv:2211.17192.
"""

import mlx.core as mx

from spec_core import Draft, LoadError, Sampling, Target
from spec_core.room import refuse_without_room
from spec_drafters._block_drafter import ContextDrafter
from spec_drafters._chain import Chain, refuse_threshold_without_head
from spec_drafters._checkpoint import Checkpoint
from spec_drafters._deepseek_config import WHERE, DraftStages, read_stages
from spec_drafters._fit import check_taps
from spec_drafters._markov import load_confidence, load_markov
from spec_drafters._shards import Shards, Stored
from spec_drafters._stages import StageBody
from spec_drafters._vocab import DraftVocab


class DeepseekV4Drafter(ContextDrafter):
    """The draft stages of a DeepSeek-V4 or V4.1 checkpoint beside their target.

    Args:
        checkpoint: The full model's, opened; only its draft stages are read.
        target: The same model, loaded.
        bits: 4 or 8 leaves FP8 and FP4 matrices packed and quantises the others; 16 computes with
            plain matrices.
        confidence_threshold: Cut the draft before the first slot whose confidence is lower. Above
            0 each draft waits for the device once, to learn its own length.
        truncate: Draw from the request's top-k, top-p and min-p too, not from temperature alone.
        dtype: Compute type; the target's without.

    Raises:
        LoadError: the checkpoint has no draft stages, does not fit the target, lacks or damages a
            tensor, or needs more memory than there is.
    """

    name = "dspark"

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        bits: int = 4,
        confidence_threshold: float = 0.0,
        truncate: bool = True,
        dtype: mx.Dtype | None = None,
    ) -> None:
        stages = read_stages(checkpoint.config, checkpoint.shapes)
        _check_fit(stages, target)
        dtype = dtype or target.embed(mx.array([0], mx.int32)).dtype
        if isinstance(checkpoint.tensors, Shards):
            needed = bytes_needed(checkpoint.tensors.stored, bits, dtype)
            refuse_without_room(WHERE, "The draft stack", needed)
        weights = checkpoint.weights(WHERE, bits, dtype)
        self.stages = stages
        self._truncate = truncate
        self._target = target
        self._body = StageBody(stages, weights, target)
        self._norm = weights.array(f"{stages.last}.norm.weight", (stages.hidden_size,))
        weights.leave("head")
        markov = load_markov(
            weights,
            "vanilla",
            stages.hidden_size,
            vocab_size=target.vocab_size,
            n_draft=target.vocab_size,
            prefix=f"{stages.last}.markov_head",
            tables=stages.markov_tables,
        )
        confidence = load_confidence(
            weights, stages.hidden_size, markov.rank, name=f"{stages.last}.confidence_head.proj"
        )
        refuse_threshold_without_head(confidence_threshold, confidence)
        vocab = DraftVocab(target.vocab_size, target.vocab_size)
        self._chain = Chain(vocab, markov, confidence, confidence_threshold)
        self.report = weights.finish()

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it observes."""
        return self.stages.taps

    @property
    def max_draft(self) -> int:
        """K, drafts of a whole block."""
        return self.stages.block_size

    def draft(self, anchor: int, cap: int, *, sampling: Sampling, key: mx.array) -> Draft:
        """Forward a block, at its full width whatever the cap, and walk the chain.

        Reads nothing from the device, unless a confidence threshold is set: then it reads one
        integer, the length of the draft.
        """
        n_drafts = min(cap, self.max_draft)
        rows = self._body.hidden(anchor, self.stages.block_size)[:n_drafts]
        normed = mx.fast.rms_norm(rows, self._norm, self.stages.eps)
        logits = self._target.unembed(normed).astype(mx.float32)
        return self._chain.draft(anchor, rows, logits, self._settings(sampling), key)


def bytes_needed(stored: dict[str, Stored], bits: int, dtype: mx.Dtype) -> int:
    """What the draft stages hold on the device at least, from the headers alone.

    Args:
        stored: Where each tensor is.
        bits: Of matrices that are not packed already.
        dtype: Compute type.
    """
    total = 0
    for name, at in stored.items():
        base, _, kind = name.rpartition(".")
        if kind == "scale" and f"{base}.weight" in stored:
            continue  # counted with its matrix
        scale = stored.get(f"{base}.scale") if kind == "weight" else None
        if scale is not None:
            packed_fp4 = scale.shape[-1] * 16 == at.shape[-1]
            n_weights = at.size * (2 if packed_fp4 else 1)
            total += n_weights * dtype.size if bits == 16 else at.nbytes + n_weights // 32
        elif kind == "weight" and len(at.shape) == 2 and bits < 16:
            total += at.size * bits // 8
        else:
            total += at.size * dtype.size
    return total


def _check_fit(stages: DraftStages, target: Target) -> None:
    """Refuse a draft stack that was made for another target."""
    check_taps(WHERE, stages.taps, stages.n_target_layers, target)
    if stages.hidden_size != target.hidden_size:
        raise LoadError(
            f"[{WHERE}] Draft stages borrow the target's table and head and must have its width, "
            f"got {stages.hidden_size} and {target.hidden_size}. Load the model they came with."
        )
    if stages.mask_id >= target.vocab_size:
        raise LoadError(
            f'[{WHERE}] "dspark_noise_token_id" must be one of the target\'s {target.vocab_size} '
            f"tokens, got {stages.mask_id}. Load the model they came with."
        )
