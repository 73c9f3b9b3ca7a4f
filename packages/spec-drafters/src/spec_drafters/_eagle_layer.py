"""The one layer of an EAGLE-3 head: attention over pairs of an embedding and a hidden state.

A chain of drafts adds one transient pair a step. Its keys are kept apart from the context's and the
two are joined inside the softmax, so that no step copies or writes the context.

References:
    EAGLE-3: Li et al. 2025, arXiv:2503.01840.
"""

from dataclasses import dataclass

import mlx.core as mx

from spec_drafters._context import ContextCache
from spec_drafters._eagle_config import EagleConfig
from spec_drafters._layers import gated_mlp, split_kv, value_rows
from spec_drafters._linear import Matrix, stack
from spec_drafters._rope import Rotation
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """Weights of the layer; norms that a lineage lacks are None.

    Attributes:
        config: Sizes and order of norms.
        rotation: Rotary positions.
        q: 2H -> n_heads * head_dim.
        kv: 2H -> keys, then values (keys alone where values are the raw keys).
        o: n_heads * head_dim -> H.
        gate_up: H -> 2I.
        down: I -> H.
        embed_norm: (H,), of the embedding.
        hidden_norm: (H,), of the hidden state.
        post_norm: (H,), before the MLP, or after attention (gemma4).
        q_norm: (head_dim,), or None.
        k_norm: (head_dim,), or None.
        pre_mlp_norm: gemma4 only.
        post_mlp_norm: gemma4 only.
        scalar: gemma4 only.
    """

    config: EagleConfig
    rotation: Rotation
    q: Matrix
    kv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    embed_norm: mx.array
    hidden_norm: mx.array
    post_norm: mx.array
    q_norm: mx.array | None
    k_norm: mx.array | None
    pre_mlp_norm: mx.array | None
    post_mlp_norm: mx.array | None
    scalar: mx.array | None

    def inputs(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """Pairs as attention reads them, the embedding first: 2 x (M, H) -> (M, 2H)."""
        eps = self.config.eps
        return mx.concatenate(
            [
                mx.fast.rms_norm(embedded, self.embed_norm, eps),
                mx.fast.rms_norm(hidden, self.hidden_norm, eps),
            ],
            axis=-1,
        )

    def keys_values(self, inputs: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Keys and values of M pairs, the first at `position`: (1, n_kv, M, head_dim) each."""
        config = self.config
        keys, values = split_kv(self.kv(inputs), config.n_kv_heads, config.head_dim)
        values = value_rows(keys, values, config.eps, config.gemma)
        if self.k_norm is not None:
            keys = mx.fast.rms_norm(keys, self.k_norm, config.eps)
        keys = self.rotation(keys.transpose(1, 0, 2)[None], position)
        return keys, values.transpose(1, 0, 2)[None]

    def queries(self, inputs: mx.array, position: int) -> mx.array:
        """Scaled queries of one pair, grouped by key head: (n_kv, heads per key head, head_dim)."""
        config = self.config
        q = self.q(inputs).reshape(1, config.n_heads, config.head_dim)
        if self.q_norm is not None:
            q = mx.fast.rms_norm(q, self.q_norm, config.eps)
        q = self.rotation(q.transpose(1, 0, 2)[None], position)
        scale = 1.0 if config.gemma else config.head_dim**-0.5
        return q.reshape(config.n_kv_heads, -1, config.head_dim) * scale

    def output(self, attended: mx.array, hidden: mx.array) -> mx.array:
        """From attention to the layer's output: (1, n_heads * head_dim), (1, H) -> (1, H)."""
        config, eps = self.config, self.config.eps
        residual = hidden
        if config.norm_before_residual:
            residual = mx.fast.rms_norm(hidden, self.hidden_norm, eps)
        a = self.o(attended)
        if not config.gemma:
            h = residual + a
            normed = mx.fast.rms_norm(h, self.post_norm, eps)
            return h + gated_mlp(self.gate_up, self.down, normed, gemma=False)
        h = residual + mx.fast.rms_norm(a, self.post_norm, eps)
        normed = mx.fast.rms_norm(h, self.pre_mlp_norm, eps)
        m = gated_mlp(self.gate_up, self.down, normed, gemma=True)
        h = h + mx.fast.rms_norm(m, self.post_mlp_norm, eps)
        return h if self.scalar is None else h * self.scalar


class PairRows:
    """A chain in progress: the context, and the pairs fed since it was last written.

    Args:
        layer: The layer.
        context: Keys and values of committed pairs; read, never written.
    """

    def __init__(self, layer: EagleLayer, context: ContextCache) -> None:
        self._layer = layer
        self._context = context
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def feed(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """Add a pair and return the layer's output for it: 2 x (1, H) -> (1, H)."""
        layer = self._layer
        position = self._context.n_rows + len(self._keys)
        inputs = layer.inputs(embedded, hidden)
        keys, values = layer.keys_values(inputs, position)
        self._keys.append(keys)
        self._values.append(values)
        attended = self._attend(layer.queries(inputs, position), position)
        return layer.output(attended, hidden)

    def _attend(self, queries: mx.array, position: int) -> mx.array:
        """Attention over context and chain, joined in one softmax: (1, n_heads * head_dim)."""
        keys, values = self._context.rows()
        chain_keys = mx.concatenate(self._keys, axis=2)[0]  # (n_kv, j, hd)
        chain_values = mx.concatenate(self._values, axis=2)[0]
        scores = queries @ chain_keys.swapaxes(-1, -2)  # (n_kv, group, j)
        n_context = 0
        if keys is not None:
            n_context = keys.shape[2]
            before = queries @ keys[0].swapaxes(-1, -2)
            window = self._layer.config.window
            if window is not None and position - self._context.n_rows + n_context >= window:
                seen = self._context.positions() > position - window
                before = mx.where(seen, before, -mx.inf)
            scores = mx.concatenate([before, scores], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        out = weights[..., n_context:] @ chain_values
        if values is not None:
            out = out + weights[..., :n_context] @ values[0]
        return out.reshape(1, -1)


def load_eagle_layer(weights: Weights, config: EagleConfig) -> EagleLayer:
    """Take the layer's tensors."""
    p, width, inner = config.prefix, config.hidden_size, config.intermediate_size
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def norm(name: str, size: int = width) -> mx.array:
        return weights.array(f"{p}.{name}.weight", (size,))

    def maybe(name: str, size: int) -> mx.array | None:
        return norm(name, size) if weights.has(f"{p}.{name}.weight") else None

    kv = [weights.matrix(f"{p}.self_attn.k_proj", n_kv, 2 * width)]
    if weights.has(f"{p}.self_attn.v_proj.weight") or not config.gemma:
        kv.append(weights.matrix(f"{p}.self_attn.v_proj", n_kv, 2 * width))
    gate = weights.matrix(f"{p}.mlp.gate_proj", inner, width)
    up = weights.matrix(f"{p}.mlp.up_proj", inner, width)
    scalar = f"{p}.layer_scalar"
    return EagleLayer(
        config=config,
        rotation=Rotation(config.rope, config.head_dim),
        q=weights.matrix(f"{p}.self_attn.q_proj", n_q, 2 * width),
        kv=weights.keep(stack(kv)),
        o=weights.matrix(f"{p}.self_attn.o_proj", width, n_q),
        gate_up=weights.keep(stack([gate, up])),
        down=weights.matrix(f"{p}.mlp.down_proj", width, inner),
        embed_norm=norm("input_layernorm"),
        hidden_norm=norm("hidden_norm"),
        post_norm=norm("post_attention_layernorm"),
        q_norm=maybe("self_attn.q_norm", config.head_dim),
        k_norm=maybe("self_attn.k_norm", config.head_dim),
        pre_mlp_norm=norm("pre_feedforward_layernorm") if config.gemma else None,
        post_mlp_norm=norm("post_feedforward_layernorm") if config.gemma else None,
        scalar=weights.array(scalar, (1,)) if weights.has(scalar) else None,
    )
