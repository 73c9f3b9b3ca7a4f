"""A second forward of every block head, in NumPy, written from the equations.

No cache, no batching, no shared code: each call recomputes everything from all committed taps. What
a head is made of is said by a `Spec` that the tests write by hand, never by the package's readers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Tensors = dict[str, Array]


def full_view(query: int, key: int, start: int) -> bool:
    """Every block row sees all context and all block rows."""
    return True


def causal_view(query: int, key: int, start: int) -> bool:
    return key <= query


def window_view(width: int, causal: bool) -> Callable[[int, int, int], bool]:
    def visible(query: int, key: int, start: int) -> bool:
        if causal and key > query:
            return False
        return key > query - width or (not causal and key >= start)

    return visible


@dataclass(frozen=True)
class Spec:
    """What the equations need to know."""

    n_heads: int = 4
    n_kv: int = 2
    head_dim: int = 16
    eps: float = 1e-6
    theta: float = 1e6
    block: int = 5
    start: int = 0  # first row that predicts
    mask_id: int = 3
    n_layers: int = 2
    gemma: bool = False
    interleaved: bool = False
    rope_dims: int | None = None
    gemma_pairs: int | None = None
    frequencies: Array | None = None  # overrides theta
    rope_gain: float = 1.0
    views: tuple[Callable[[int, int, int], bool], ...] = (full_view, full_view)
    embed_scale: float = 1.0
    norm_shift: float = 0.0
    gated: bool = False
    sinks: bool = False
    snr: tuple[float, float] | None = None
    anchor_is_noise: bool = False  # a mistake: the two ends of the log-SNR range swapped
    markov: str | None = "vanilla"
    softcap: float | None = None
    multiplier: float = 1.0
    confidence_with_markov: bool = True
    temperatures: tuple[float, ...] = ()
    conv_group: int | None = None
    conv_from_output: bool = False  # a mistake: the second convolution's kernel from its own input
    top_k: int | None = None  # of DFlash 2's selector


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def rotate(x: Array, positions: Array, spec: Spec) -> Array:
    """Rotate (T, heads, hd) as complex numbers."""
    hd = spec.head_dim
    dims = spec.rope_dims or hd
    half = dims // 2
    if spec.frequencies is not None:
        inv = spec.frequencies
    else:
        inv = spec.theta ** (-2 * np.arange(half) / dims)
        if spec.gemma_pairs is not None:
            inv = np.where(np.arange(half) < spec.gemma_pairs, inv, 0.0)
    turn = np.exp(1j * positions[:, None, None] * inv) * spec.rope_gain
    out = x.copy()
    if spec.interleaved:
        z = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * turn
        out[..., 0:dims:2], out[..., 1:dims:2] = z.real, z.imag
    else:
        z = (x[..., :half] + 1j * x[..., half:dims]) * turn
        out[..., :half], out[..., half:dims] = z.real, z.imag
    return out


def keys_values(spec: Spec, w: Tensors, p: str, x: Array, positions: Array) -> tuple[Array, Array]:
    n = x.shape[0]
    raw = linear(w, f"{p}.self_attn.k_proj", x).reshape(n, spec.n_kv, spec.head_dim)
    if f"{p}.self_attn.v_proj.weight" in w:
        v = linear(w, f"{p}.self_attn.v_proj", x).reshape(n, spec.n_kv, spec.head_dim)
    else:
        v = raw
    if spec.gemma:
        v = rms(v, 1.0, spec.eps)
    k = rms(raw, norm(w, f"{p}.self_attn.k_norm", spec), spec.eps)
    return rotate(k, positions, spec), v


def linear(w: Tensors, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(w: Tensors, name: str, spec: Spec) -> Array:
    return w[f"{name}.weight"] + spec.norm_shift


def attention(
    spec: Spec, w: Tensors, layer: int, u: Array, context: Array, n_context: int
) -> Array:
    p, n, hd = f"layers.{layer}", u.shape[0], spec.head_dim
    positions = np.arange(n_context, n_context + n)
    q = linear(w, f"{p}.self_attn.q_proj", u)
    gate = None
    if spec.gated:
        pairs = q.reshape(n, spec.n_heads, 2 * hd)
        q, gate = pairs[..., :hd], pairs[..., hd:].reshape(n, -1)
    q = rms(q.reshape(n, spec.n_heads, hd), norm(w, f"{p}.self_attn.q_norm", spec), spec.eps)
    q = rotate(q, positions, spec)
    ck, cv = keys_values(spec, w, p, context, np.arange(n_context))
    bk, bv = keys_values(spec, w, p, u, positions)
    k, v = np.concatenate([ck, bk]), np.concatenate([cv, bv])
    out = np.zeros((n, spec.n_heads, hd))
    scale = 1.0 if spec.gemma else hd**-0.5
    for row in range(n):
        seen = [j for j in range(len(k)) if spec.views[layer](n_context + row, j, n_context)]
        for head in range(spec.n_heads):
            group = head * spec.n_kv // spec.n_heads
            scores = k[seen, group] @ q[row, head] * scale
            if spec.sinks:
                sink = w[f"{p}.self_attn.attention_sink_bias"][head]
                weights = softmax(np.append(scores, sink))[:-1]
            else:
                weights = softmax(scores)
            out[row, head] = weights @ v[seen, group]
    out = out.reshape(n, -1)
    return linear(w, f"{p}.self_attn.o_proj", out if gate is None else out * sigmoid(gate))


def mlp(spec: Spec, w: Tensors, p: str, x: Array) -> Array:
    gate, up = linear(w, f"{p}.mlp.gate_proj", x), linear(w, f"{p}.mlp.up_proj", x)
    if spec.gemma:
        act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        act = gate * sigmoid(gate)
    return linear(w, f"{p}.mlp.down_proj", act * up)


def convolved(spec: Spec, w: Tensors, name: str, u: Array, sublayer: Callable) -> Array:
    """DFlash 2: a dynamic convolution before and after a sublayer, from the same coefficients."""
    if spec.conv_group is None:
        return sublayer(u)
    base = w[f"{name}.base_kernel"]
    _, taps, width = base.shape

    def conv(side: int, x: Array) -> Array:
        source = x if side == 1 and spec.conv_from_output else u
        made = (source @ w[f"{name}.kernel_projection.weight"].T).reshape(
            len(u), 2, taps, width // spec.conv_group
        )
        y = np.zeros_like(x)
        for t in range(len(x)):
            for o in range(taps):
                if t - o < 0:
                    continue
                for c in range(width):
                    factor = base[side, o, c] + made[t, side, o, c // spec.conv_group]
                    y[t, c] += factor * x[t - o, c]
        return y

    return conv(1, sublayer(conv(0, u)))


def hidden_rows(
    spec: Spec, w: Tensors, embedding: Array, taps: Array, anchor: int, n_rows: int | None = None
) -> Array:
    """Final normed rows of the whole block, (B, H)."""
    ids = [anchor] + [spec.mask_id] * ((n_rows or spec.block) - 1)
    context = rms(taps @ w["fc.weight"].T, norm(w, "hidden_norm", spec), spec.eps)
    h = embedding[ids] * spec.embed_scale
    if spec.snr is not None:
        h = h + snr_rows(spec, w, len(ids))
    n_context = len(taps)
    for layer in range(spec.n_layers):
        p = f"layers.{layer}"
        a = convolved(
            spec,
            w,
            f"{p}.attention_conv",
            rms(h, norm(w, f"{p}.input_layernorm", spec), spec.eps),
            lambda u, layer=layer: attention(spec, w, layer, u, context, n_context),
        )
        post = norm(w, f"{p}.post_attention_layernorm", spec)
        if spec.gemma:
            h = h + rms(a, post, spec.eps)
            g = rms(h, norm(w, f"{p}.pre_feedforward_layernorm", spec), spec.eps)
            m = mlp(spec, w, p, g)
            h = h + rms(m, norm(w, f"{p}.post_feedforward_layernorm", spec), spec.eps)
            h = h * w[f"{p}.layer_scalar"]
        else:
            h = h + a
            g = rms(h, post, spec.eps)
            h = h + convolved(spec, w, f"{p}.mlp_conv", g, lambda x, p=p: mlp(spec, w, p, x))
    return rms(h, norm(w, "norm", spec), spec.eps)


def snr_rows(spec: Spec, w: Tensors, n_rows: int) -> Array:
    assert spec.snr is not None
    low, high = spec.snr
    rows = []
    for slot in range(n_rows):
        t = 1000.0 * ((high if (slot == 0) != spec.anchor_is_noise else low) - low) / (high - low)
        f = 10000.0 ** (-np.arange(64) / 64)
        features = np.concatenate([np.sin(t * f), np.cos(t * f)])
        inner = linear(w, "log_snr_embed.fc1", features)
        rows.append(linear(w, "log_snr_embed.fc2", inner * sigmoid(inner)))
    return np.stack(rows)


def markov_bias(
    spec: Spec, w: Tensors, previous: int, z: Array, state: Array
) -> tuple[Array, Array]:
    """Bias of one slot and the next recurrent state."""
    e, w2 = w["markov_head.markov_w1.weight"][previous], w["markov_head.markov_w2.weight"]
    if spec.markov == "vanilla":
        return w2 @ e, state
    if spec.markov == "gated":
        g = sigmoid(linear(w, "markov_head.gate_proj", np.concatenate([z, e])))
        return w2 @ (g * e), state
    y = linear(w, "markov_head.joint_proj", np.concatenate([state, e, z]))
    gate, candidate, out = np.split(y, 3)
    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
    return w2 @ np.tanh(out), state


@dataclass(frozen=True)
class Slot:
    """One slot of a draft: logits over the draft vocabulary, the confidence if there is one."""

    logits: Array
    confidence: float | None


def chain(
    spec: Spec,
    w: Tensors,
    hidden: Array,
    head: Array,
    anchor: int,
    choose: Callable[[int, Array], int],
) -> list[Slot]:
    """Walk the slots of a DSpark, DFlash or DFlash 2 head.

    `choose(slot, logits)` returns the TARGET id that the slot settles on.
    """
    raw = hidden[spec.start :] @ head.T * spec.multiplier
    if spec.softcap is not None:
        raw = spec.softcap * np.tanh(raw / spec.softcap)
    rank = w["markov_head.markov_w1.weight"].shape[1] if spec.markov else 1
    previous, state, slots = anchor, np.zeros(rank), []
    for i, u in enumerate(raw):
        z = hidden[spec.start + i]
        logits = u
        if spec.markov:
            bias, state = markov_bias(spec, w, previous, z, state)
            logits = u + bias
        if spec.top_k is not None:
            logits = selected(spec, w, u, z, previous)
        slots.append(Slot(logits, confidence(spec, w, z, previous, i)))
        previous = choose(i, logits)
    return slots


def confidence(spec: Spec, w: Tensors, z: Array, previous: int, i: int) -> float | None:
    if "confidence_head.proj.weight" not in w:
        return None
    x = z
    if spec.confidence_with_markov:
        x = np.concatenate([z, w["markov_head.markov_w1.weight"][previous]])
    bias = w.get("confidence_head.proj.bias", np.zeros(1))
    logit = w["confidence_head.proj.weight"].reshape(-1) @ x + bias.reshape(-1)
    temperature = spec.temperatures[i] if i < len(spec.temperatures) else 1.0
    return float(sigmoid(logit / temperature)[0])


def selected(spec: Spec, w: Tensors, unary: Array, z: Array, previous: int) -> Array:
    """DFlash 2's scores: only the top-k candidates of a slot can be chosen."""
    g = w["candidate_selector.hidden_projection.weight"] @ z
    a = w["candidate_selector.predecessor_codebook"][previous]
    best = np.argsort(-unary, kind="stable")[: spec.top_k]
    scores = np.full(unary.shape, -np.inf)
    for c in best:
        scores[c] = unary[c] + (a * g) @ w["candidate_selector.successor_codebook"][c]
    return scores
