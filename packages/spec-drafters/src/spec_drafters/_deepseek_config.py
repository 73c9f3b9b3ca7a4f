"""The draft stages inside a DeepSeek-V4 or V4.1 checkpoint, described: data only.

Sizes come from the tensors' shapes; the config, in the spelling of Hugging Face or of DeepSeek's
own inference code, says what shapes cannot. Knows nothing about weights' values.

References:
    DeepSeek-V4 and V4.1, `config.json` and `inference/config.json`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spec_core import LoadError

WHERE = "dspark"
Shapes = Mapping[str, tuple[int, ...]]
# Hugging Face's spelling -> that of the inference code.
_SPELLINGS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "rms_norm_eps": "norm_eps",
    "scoring_func": "score_func",
}


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of the latent attention.

    Attributes:
        n_heads: Query heads.
        head_dim: Width of a head, and of the one key-value row that all heads share.
        rope_dims: Trailing dimensions of a head that turn.
        theta: Base of the rotary frequencies.
        q_rank: Width of the query's latent.
        o_rank: Width of the output's latent, per group.
        n_groups: Groups of heads in the output projection.
        window: W, context rows that a block sees.
        head_norm: Every query head is divided by its root mean square (V4).
    """

    n_heads: int
    head_dim: int
    rope_dims: int
    theta: float
    q_rank: int
    o_rank: int
    n_groups: int
    window: int
    head_norm: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of the mixture of experts.

    Attributes:
        n_experts: Routed experts.
        n_active: Experts that a row goes through.
        inner: Width inside an expert.
        scale: Multiplies the routing weights.
        temperature: Divides the routing logits.
        normed: Routing weights sum to 1 before `scale`.
        limit: Clamps both halves of an expert's input; 0 for no clamp.
    """

    n_experts: int
    n_active: int
    inner: int
    scale: float
    temperature: float
    normed: bool
    limit: float


@dataclass(frozen=True, slots=True)
class Hyper:
    """Sizes of the hyper-connections.

    Attributes:
        n_copies: hc, copies of the residual stream.
        n_iterations: Sinkhorn normalisations.
        eps: Added to mixes and sums.
    """

    n_copies: int
    n_iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class DraftStages:
    """The bundled draft stack.

    Attributes:
        generation: "v4", or "v4.1" with mixes that lag by one sublayer.
        n_stages: Decoder blocks, counted from the tensors.
        hidden_size: D.
        eps: Of all norms.
        taps: Target layers, 0-based, output of the layer.
        n_target_layers: Depth of the target.
        block_size: B; the anchor's row predicts, so also the drafts of a block.
        mask_id: Token of the rows behind the anchor.
        attention: Sizes.
        experts: Sizes.
        hyper: Sizes.
    """

    generation: Literal["v4", "v4.1"]
    n_stages: int
    hidden_size: int
    eps: float
    taps: tuple[int, ...]
    n_target_layers: int
    block_size: int
    mask_id: int
    attention: Attention
    experts: Experts
    hyper: Hyper

    @property
    def last(self) -> str:
        """What the names of the last stage's tensors start with."""
        return f"mtp.{self.n_stages - 1}"

    @property
    def markov_tables(self) -> tuple[str, str]:
        """Names of W1 and W2 in this generation."""
        return ("markov_w1", "markov_w2") if self.generation == "v4" else ("embed", "head")


def read_stages(config: Mapping[str, Any], shapes: Shapes) -> DraftStages:
    """The draft stages of a checkpoint.

    Args:
        config: config.json; the language model's part may be nested in "text_config".
        shapes: Shape of each `mtp.*` tensor, as stored.

    Raises:
        LoadError: a setting or tensor that the description needs is missing or makes no sense, or
            is of a kind that is not supported.
    """
    settings = _Settings(config)
    n_stages = _count_stages(shapes)
    generation = _generation(shapes, n_stages)
    n_target_layers = settings.whole("num_hidden_layers")
    kind = settings.get("scoring_func", "sqrtsoftplus")
    if kind != "sqrtsoftplus":
        raise LoadError(
            f'[{WHERE}] The routing of draft stages must be "sqrtsoftplus", got "{kind}". Use '
            "lookup for this target."
        )
    return DraftStages(
        generation=generation,
        n_stages=n_stages,
        hidden_size=_shape(shapes, "mtp.0.attn_norm.weight", 1)[0],
        eps=float(settings.get("rms_norm_eps", 1e-6)),
        taps=_taps(settings, generation, n_target_layers),
        n_target_layers=n_target_layers,
        block_size=settings.whole("dspark_block_size"),
        mask_id=settings.whole("dspark_noise_token_id", least=0),
        attention=_attention(settings, shapes, generation),
        experts=_experts(settings, shapes),
        hyper=_hyper(settings, shapes),
    )


class _Settings:
    """A config in either spelling, nested or not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        self._values = {**config, **nested} if isinstance(nested, Mapping) else dict(config)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting by its Hugging Face name; null counts as absent."""
        for name in (key, _SPELLINGS.get(key, key)):
            if self._values.get(name) is not None:
                return self._values[name]
        return default

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A setting that must be a whole number."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise LoadError(
                f'[{WHERE}] "{key}" in config.json must be a whole number of at least {least}, got '
                f"{value!r}. Use the config.json that belongs to the checkpoint."
            )
        return value

    def layers(self, key: str) -> list[int]:
        """A setting that must be a list of layers."""
        value = self.get(key, [])
        if not isinstance(value, Sequence) or not all(type(layer) is int for layer in value):
            raise LoadError(
                f'[{WHERE}] "{key}" in config.json must be a list of layers, got {value!r}. Use '
                "the config.json that belongs to the checkpoint."
            )
        return list(value)


def _count_stages(shapes: Shapes) -> int:
    """How many stages are stored; configs have said one where there are three."""
    found = {int(m[1]) for name in shapes if (m := re.match(r"mtp\.(\d+)\.", name))}
    if found != set(range(len(found))):
        raise LoadError(
            f"[{WHERE}] Draft stages must be numbered from 0 without a gap, got {sorted(found)}. "
            "Download the missing shards."
        )
    return len(found)


def _generation(shapes: Shapes, n_stages: int) -> Literal["v4", "v4.1"]:
    """By the names of the Markov tables, which differ."""
    prefix = f"mtp.{n_stages - 1}.markov_head"
    if f"{prefix}.markov_w2.weight" in shapes:
        return "v4"
    if f"{prefix}.head.weight" in shapes:
        return "v4.1"
    raise LoadError(
        f'[{WHERE}] The last draft stage must hold "{prefix}.markov_w2.weight" (V4) or '
        f'"{prefix}.head.weight" (V4.1), got neither. Download the missing shards.'
    )


def _taps(settings: _Settings, generation: str, depth: int) -> tuple[int, ...]:
    """Tapped layers by their output; V4.1 names the layers that the tapped stream enters."""
    listed = settings.layers("dspark_target_layer_ids")
    if not listed or listed != sorted(set(listed)) or listed[-1] >= depth:
        raise LoadError(
            f'[{WHERE}] "dspark_target_layer_ids" must ascend within the {depth} target layers, '
            f"got {listed}. Use the config.json that belongs to the checkpoint."
        )
    if generation == "v4":
        return tuple(listed)
    if listed[0] == 0:
        raise LoadError(
            f"[{WHERE}] A V4.1 draft must tap what enters a layer behind the first, got layer 0. "
            "Use lookup for this target."
        )
    between = sorted(set(listed) & set(settings.layers("engram_layer_ids")))
    if between:
        raise LoadError(
            f"[{WHERE}] Tapped layers must not add an engram to the stream first, got layers "
            f"{between} that do. Use lookup for this target."
        )
    return tuple(layer - 1 for layer in listed)


def _attention(settings: _Settings, shapes: Shapes, generation: str) -> Attention:
    (n_heads,) = _shape(shapes, "mtp.0.attn.attn_sink", 1)
    (head_dim,) = _shape(shapes, "mtp.0.attn.kv_norm.weight", 1)
    (q_rank,) = _shape(shapes, "mtp.0.attn.q_norm.weight", 1)
    n_out, n_in = _shape(shapes, "mtp.0.attn.wo_a.weight", 2)
    n_groups = n_heads * head_dim // max(n_in, 1)
    rope_dims = settings.whole("qk_rope_head_dim", 64)
    if n_groups * n_in != n_heads * head_dim or n_out % max(n_groups, 1):
        raise LoadError(
            f'[{WHERE}] "mtp.0.attn.wo_a.weight" must cut {n_heads} heads of {head_dim} into equal '
            f"groups, got shape {(n_out, n_in)}. Download the checkpoint again."
        )
    if rope_dims % 2 or rope_dims > head_dim:
        raise LoadError(
            f'[{WHERE}] "qk_rope_head_dim" must be even and at most {head_dim}, got {rope_dims}. '
            "Use the config.json that belongs to the checkpoint."
        )
    return Attention(
        n_heads=n_heads,
        head_dim=head_dim,
        rope_dims=rope_dims,
        theta=float(settings.get("rope_theta", 10000.0)),
        q_rank=q_rank,
        o_rank=n_out // n_groups,
        n_groups=n_groups,
        window=settings.whole("sliding_window"),
        head_norm=generation == "v4",
    )


def _experts(settings: _Settings, shapes: Shapes) -> Experts:
    n_experts, _ = _shape(shapes, "mtp.0.ffn.gate.weight", 2)
    inner, _ = _shape(shapes, "mtp.0.ffn.shared_experts.w1.weight", 2)
    n_active = settings.get("dspark_num_experts_per_tok")
    if n_active is None:
        n_active = settings.whole("num_experts_per_tok")
    if type(n_active) is not int or not 1 <= n_active <= n_experts:
        raise LoadError(
            f"[{WHERE}] Experts per token must be 1..{n_experts}, the experts of a draft stage, "
            f"got {n_active!r}. Use the config.json that belongs to the checkpoint."
        )
    return Experts(
        n_experts=n_experts,
        n_active=n_active,
        inner=inner,
        scale=float(settings.get("routed_scaling_factor", 1.0)),
        temperature=float(settings.get("gate_temp", 1.0)),
        normed=bool(settings.get("norm_topk_prob", True)),
        limit=float(settings.get("swiglu_limit", 0.0)),
    )


def _hyper(settings: _Settings, shapes: Shapes) -> Hyper:
    (n_mixes,) = _shape(shapes, "mtp.0.hc_attn_base", 1)
    n_copies = settings.whole("hc_mult", 4)
    if n_mixes != (2 + n_copies) * n_copies:
        raise LoadError(
            f'[{WHERE}] "mtp.0.hc_attn_base" must hold (2 + n) n mixes of "hc_mult" = {n_copies} '
            f"copies, {(2 + n_copies) * n_copies}, got {n_mixes}. Use the config.json that belongs "
            "to the checkpoint."
        )
    iterations = settings.whole("hc_sinkhorn_iters", 20)
    return Hyper(n_copies, iterations, float(settings.get("hc_eps", 1e-6)))


def _shape(shapes: Shapes, name: str, n_axes: int) -> tuple[int, ...]:
    """Shape of a tensor that must be there."""
    shape = shapes.get(name)
    if shape is None:
        raise LoadError(
            f'[{WHERE}] The checkpoint must hold "{name}", got {len(shapes)} other tensors. '
            "Download it again, or use a complete export."
        )
    if len(shape) != n_axes:
        raise LoadError(
            f'[{WHERE}] "{name}" must have {n_axes} axes, got shape {tuple(shape)}. Download the '
            "checkpoint again."
        )
    return tuple(shape)
