"""One decoder layer of a block head, loaded and applied; the variants of all lineages.

References:
    Qwen3 and Gemma 4 decoder layers as in Hugging Face transformers; the dynamic convolution of
    DFlash 2 (Inco AI and z-lab, 2026, blog).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_drafters._head import Backbone, HeadConfig
from spec_drafters._linear import Matrix, stack, stackable
from spec_drafters._rope import Rotation
from spec_drafters._weights import Weights


@dataclass(frozen=True, slots=True)
class DynamicConv:
    """A short causal convolution over the rows of a block, its kernel partly made by the input.

    Attributes:
        base: Shape (2, taps, H); side 0 is applied to the input, side 1 to the output.
        projection: (2 * taps * groups) x H.
        group_size: Channels that share a dynamic coefficient.
    """

    base: mx.array
    projection: Matrix
    group_size: int

    def kernels(self, normed: mx.array) -> mx.array:
        """Coefficients from the sublayer's normed input: (B, H) -> (2, taps, B, H)."""
        _, n_taps, width = self.base.shape
        made = self.projection(normed).reshape(-1, 2, n_taps, width // self.group_size)
        made = mx.repeat(made, self.group_size, axis=-1)  # (B, 2, taps, H)
        return self.base[:, :, None, :] + made.transpose(1, 2, 0, 3)

    @staticmethod
    def apply(kernel: mx.array, x: mx.array) -> mx.array:
        """Convolve (B, H) with (taps, B, H); rows before the block are zero."""
        total = kernel[0] * x
        for back in range(1, min(kernel.shape[0], x.shape[0])):
            shifted = mx.pad(x[:-back], [(back, 0), (0, 0)])
            total = total + kernel[back] * shifted
        return total


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer.

    Attributes:
        q: Query projection (a gate beside each head in the gated fork).
        kv: Key rows, then value rows; key rows alone where values are the raw keys.
        o: Output projection.
        gate_up: Gate rows, then up rows.
        down: Down projection.
        input_norm: (H,), before attention.
        post_norm: (H,), before the MLP (qwen3) or after attention (gemma4).
        q_norm: (head_dim,).
        k_norm: (head_dim,).
        pre_mlp_norm: (H,), gemma4 only.
        post_mlp_norm: (H,), gemma4 only.
        scalar: (1,), gemma4 only.
        sinks: (n_heads,), where the head has them.
        attention_conv: DFlash 2 only.
        mlp_conv: DFlash 2 only.
    """

    q: Matrix
    kv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: mx.array
    post_norm: mx.array
    q_norm: mx.array
    k_norm: mx.array
    pre_mlp_norm: mx.array | None = None
    post_mlp_norm: mx.array | None = None
    scalar: mx.array | None = None
    sinks: mx.array | None = None
    attention_conv: DynamicConv | None = None
    mlp_conv: DynamicConv | None = None


def load_layers(weights: Weights, head: HeadConfig) -> tuple[list[Layer], Matrix | None]:
    """All layers, and their key and value rows as one matrix (None where packings differ).

    The layers' own `kv` are slices of the joint matrix, so nothing is held twice.
    """
    body = head.backbone
    n_layers = len(body.views)
    parts = [_kv_parts(weights, f"layers.{i}.self_attn", body) for i in range(n_layers)]
    joint: Matrix | None = None
    if stackable([m for pair in parts for m in pair]):
        joint = weights.keep(stack([m for pair in parts for m in pair]))
        step = joint.n_out // n_layers
        kvs = [joint.slice(i * step, (i + 1) * step) for i in range(n_layers)]
    else:
        kvs = [stack(pair) for pair in parts]
    kvs = [weights.keep(kv) for kv in kvs]
    return [_load_layer(weights, i, head, kv) for i, kv in enumerate(kvs)], joint


def _kv_parts(weights: Weights, prefix: str, body: Backbone) -> list[Matrix]:
    n_rows = body.n_kv_heads * body.head_dim
    parts = [weights.matrix(f"{prefix}.k_proj", n_rows, body.hidden_size)]
    if body.kind == "qwen3" or weights.has(f"{prefix}.v_proj.weight"):
        parts.append(weights.matrix(f"{prefix}.v_proj", n_rows, body.hidden_size))
    return parts


def _load_layer(weights: Weights, i: int, head: HeadConfig, kv: Matrix) -> Layer:
    body, p = head.backbone, f"layers.{i}"
    width, n_q = body.hidden_size, body.n_heads * body.head_dim
    inner = body.intermediate_size
    gemma = body.kind == "gemma4"
    gate = weights.matrix(f"{p}.mlp.gate_proj", inner, width)
    up = weights.matrix(f"{p}.mlp.up_proj", inner, width)

    def norm(name: str, size: int = width) -> mx.array:
        return weights.keep(weights.array(f"{p}.{name}.weight", (size,)) + body.norm_offset)

    def conv(name: str) -> DynamicConv | None:
        if head.conv is None:
            return None
        n_taps, group = head.conv
        n_out = 2 * n_taps * (width // group)
        return DynamicConv(
            weights.array(f"{p}.{name}.base_kernel", (2, n_taps, width)),
            weights.matrix(f"{p}.{name}.kernel_projection", n_out, width),
            group,
        )

    return Layer(
        q=weights.matrix(f"{p}.self_attn.q_proj", n_q * (2 if body.gated_query else 1), width),
        kv=kv,
        o=weights.matrix(f"{p}.self_attn.o_proj", width, n_q),
        gate_up=weights.keep(stack([gate, up])),
        down=weights.matrix(f"{p}.mlp.down_proj", width, inner),
        input_norm=norm("input_layernorm"),
        post_norm=norm("post_attention_layernorm"),
        q_norm=norm("self_attn.q_norm", body.head_dim),
        k_norm=norm("self_attn.k_norm", body.head_dim),
        pre_mlp_norm=norm("pre_feedforward_layernorm") if gemma else None,
        post_mlp_norm=norm("post_feedforward_layernorm") if gemma else None,
        scalar=weights.array(f"{p}.layer_scalar", (1,)) if gemma else None,
        sinks=(
            weights.array(f"{p}.self_attn.attention_sink_bias", (body.n_heads,))
            if body.sinks
            else None
        ),
        attention_conv=conv("attention_conv"),
        mlp_conv=conv("mlp_conv"),
    )


def split_kv(y: mx.array, n_kv: int, head_dim: int) -> tuple[mx.array, mx.array | None]:
    """Keys and values out of a `kv` projection, (..., n_kv, hd) each; values may be absent."""
    rows = y.reshape(*y.shape[:-1], -1, n_kv, head_dim)
    return rows[..., 0, :, :], rows[..., 1, :, :] if rows.shape[-3] == 2 else None


def value_rows(keys: mx.array, values: mx.array | None, eps: float, gemma: bool) -> mx.array:
    """Values as attention reads them; gemma4 norms the raw values (or keys) without weight."""
    raw = keys if values is None else values
    return mx.fast.rms_norm(raw, None, eps) if gemma else raw


# Heads x rows x keys x head size up to which reading the keys anew for every row costs less than
# the launches of plain operations.
_FOLDED = 1 << 26
KeysValues = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
Mask = mx.array | str | None  # as `mx.fast.scaled_dot_product_attention` takes it
Sublayer = Callable[[mx.array], mx.array]


def layer_step(
    layer: Layer, body: Backbone, h: mx.array, attention: Sublayer, mlp: Sublayer
) -> mx.array:
    """Norms, residuals and convolutions around the two sublayers: (B, H) -> (B, H)."""
    eps = body.eps
    a = _convolved(layer.attention_conv, mx.fast.rms_norm(h, layer.input_norm, eps), attention)
    if body.kind == "qwen3":
        h = h + a
        return h + _convolved(layer.mlp_conv, mx.fast.rms_norm(h, layer.post_norm, eps), mlp)
    assert layer.scalar is not None
    h = h + mx.fast.rms_norm(a, layer.post_norm, eps)
    m = mlp(mx.fast.rms_norm(h, layer.pre_mlp_norm, eps))
    return (h + mx.fast.rms_norm(m, layer.post_mlp_norm, eps)) * layer.scalar


def _convolved(conv: DynamicConv | None, normed: mx.array, sublayer: Sublayer) -> mx.array:
    """A sublayer between its two convolutions; both use what the normed input makes."""
    if conv is None:
        return sublayer(normed)
    before, after = conv.kernels(normed)
    return conv.apply(after, sublayer(conv.apply(before, normed)))


def attend(
    layer: Layer,
    body: Backbone,
    rotation: Rotation,
    normed: mx.array,
    offset: int | mx.array,
    contexts: Sequence[tuple[KeysValues, Mask]],
) -> mx.array:
    """Attention of block rows over the context and themselves: (R * B, H) -> (R * B, H).

    Args:
        layer: Weights.
        body: Sizes.
        rotation: Rotary positions.
        normed: Normed rows of R sequences' blocks, one after the other, shape (R * B, H).
        offset: Absolute position of each block's first row, shape (R,); a number for R = 1.
        contexts: For each sequence what puts the block's keys and values behind its context's, and
            its mask.
    """
    n_all, hd, n_seq = normed.shape[0], body.head_dim, len(contexts)
    n_rows, gemma = n_all // n_seq, body.kind == "gemma4"
    q, gate = layer.q(normed), None
    if body.gated_query:
        pairs = q.reshape(n_all, body.n_heads, 2, hd)
        q, gate = pairs[:, :, 0], pairs[:, :, 1].reshape(n_all, -1)
    k, v = split_kv(layer.kv(normed).reshape(n_seq, n_rows, -1), body.n_kv_heads, hd)
    v = value_rows(k, v, body.eps, gemma)
    q = mx.fast.rms_norm(q.reshape(n_seq, n_rows, body.n_heads, hd), layer.q_norm, body.eps)
    k = mx.fast.rms_norm(k, layer.k_norm, body.eps)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))  # (R, heads, B, hd)
    q, k = rotation(q, offset), rotation(k, offset)
    scale = 1.0 if gemma else hd**-0.5
    parts = [[x] if n_seq == 1 else mx.split(x, n_seq) for x in (q, k, v)]
    outs: list[mx.array] = []
    for one_q, one_k, one_v, (keys_values, mask) in zip(*parts, contexts, strict=True):
        keys, values = keys_values(one_k, one_v)
        outs.append(_attention(one_q, keys, values, scale, mask, layer.sinks))
    out = outs[0] if n_seq == 1 else mx.concatenate(outs)
    out = out.transpose(0, 2, 1, 3).reshape(n_all, -1)  # (R * B, n_heads * hd)
    return layer.o(out if gate is None else out * mx.sigmoid(gate))


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a block: q (1, n_heads, B, hd), k and v (1, n_kv, N, hd)."""
    if sinks is not None or not plans_by_length():
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    n_kv, n_rows, n_keys = k.shape[1], q.shape[2], k.shape[2]
    if mask is None and q.size * n_keys <= _FOLDED:
        # Every row as a head with one query: that goes to MLX's own kernel, which plans nothing.
        folded = q.reshape(1, -1, 1, q.shape[-1])
        return mx.fast.scaled_dot_product_attention(folded, k, v, scale=scale).reshape(q.shape)
    grouped = (q * scale).reshape(1, n_kv, -1, q.shape[-1])
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(1, n_kv, -1, n_rows, n_keys)
    if isinstance(mask, str):
        mask = mx.arange(n_keys)[None] <= mx.arange(n_keys - n_rows, n_keys)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights.reshape(1, n_kv, -1, n_keys) @ v).reshape(q.shape)


@functools.cache
def plans_by_length() -> bool:
    """Whether MLX's fused attention plans anew for every number of keys: on CUDA, in cuDNN.

    A draft meets a longer context each round, so that each would pay for a plan used once.
    """
    return mx.default_device() == mx.gpu and not mx.metal.is_available()


def rows_to_compute(n: int) -> int:
    """Rows to compute where `n` are wanted: on CUDA, where a shape that is new costs a start."""
    return 1 << (n - 1).bit_length() if plans_by_length() else n


def gated_mlp(gate_up: Matrix, down: Matrix, normed: mx.array, *, gemma: bool) -> mx.array:
    """The gated MLP, with silu or gemma's gelu: (B, H) -> (B, H)."""
    gate, up = mx.split(gate_up(normed), 2, axis=-1)
    return down((_gelu_tanh(gate) if gemma else gate * mx.sigmoid(gate)) * up)


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
