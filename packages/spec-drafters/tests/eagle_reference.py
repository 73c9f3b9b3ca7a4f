"""A second EAGLE-3 forward in NumPy: every pair recomputed at every step, no cache."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .reference import Array, Spec, Tensors, rms, rotate, sigmoid, softmax


@dataclass(frozen=True)
class EagleSpec:
    """What the equations need to know."""

    prefix: str = "midlayer"
    n_heads: int = 4
    n_kv: int = 2
    head_dim: int = 16
    eps: float = 1e-6
    theta: float = 1e4
    gemma: bool = False
    gemma_pairs: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    embed_scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    # Mistakes, to see that the tests notice them.
    swapped: bool = False  # [hidden; embedding]
    fc_twice: bool = False
    same_index: bool = False  # the state of position i paired with token i

    @property
    def rope(self) -> Spec:
        return Spec(head_dim=self.head_dim, theta=self.theta, gemma_pairs=self.gemma_pairs)


def fuse(spec: EagleSpec, w: Tensors, taps: Array) -> Array:
    """(N, n H_target) -> (N, H)."""
    parts = np.split(taps, 3, axis=1)
    if "fc_norm.0.weight" in w:
        parts = [rms(p, w[f"fc_norm.{j}.weight"], spec.eps) for j, p in enumerate(parts)]
    joint = np.concatenate(parts, axis=1)
    if "input_norm.weight" in w:
        joint = rms(joint, w["input_norm.weight"], spec.eps)
    return joint @ w["fc.weight"].T


def layer(spec: EagleSpec, w: Tensors, states: Array, embedded: Array) -> Array:
    """The layer's output for the last of all pairs, (H,)."""
    p, n, hd = spec.prefix, len(states), spec.head_dim
    e = rms(embedded, w[f"{p}.input_layernorm.weight"], spec.eps)
    h = rms(states, w[f"{p}.hidden_norm.weight"], spec.eps)
    u = np.concatenate([h, e] if spec.swapped else [e, h], axis=1)
    positions = np.arange(n)

    def heads(name: str, count: int) -> Array:
        x = (u @ w[f"{p}.self_attn.{name}_proj.weight"].T).reshape(n, count, hd)
        weight = w.get(f"{p}.self_attn.{name}_norm.weight")
        return x if weight is None else rms(x, weight, spec.eps)

    q, k = heads("q", spec.n_heads), heads("k", spec.n_kv)
    raw = (u @ w[f"{p}.self_attn.k_proj.weight"].T).reshape(n, spec.n_kv, hd)
    v = heads("v", spec.n_kv) if f"{p}.self_attn.v_proj.weight" in w else raw
    if spec.gemma:
        v = rms(v, 1.0, spec.eps)
    q, k = rotate(q, positions, spec.rope), rotate(k, positions, spec.rope)
    first = 0 if spec.window is None else max(0, n - spec.window)
    out = np.zeros((spec.n_heads, hd))
    for head in range(spec.n_heads):
        group = head * spec.n_kv // spec.n_heads
        scores = k[first:, group] @ q[-1, head] * (1.0 if spec.gemma else hd**-0.5)
        out[head] = softmax(scores) @ v[first:, group]
    a = w[f"{p}.self_attn.o_proj.weight"] @ out.reshape(-1)
    r = h[-1] if spec.norm_before_residual else states[-1]
    post = w[f"{p}.post_attention_layernorm.weight"]
    if not spec.gemma:
        h1 = r + a
        return h1 + mlp(spec, w, rms(h1, post, spec.eps))
    h1 = r + rms(a, post, spec.eps)
    m = mlp(spec, w, rms(h1, w[f"{p}.pre_feedforward_layernorm.weight"], spec.eps))
    return h1 + rms(m, w[f"{p}.post_feedforward_layernorm.weight"], spec.eps)


def mlp(spec: EagleSpec, w: Tensors, x: Array) -> Array:
    gate = w[f"{spec.prefix}.mlp.gate_proj.weight"] @ x
    up = w[f"{spec.prefix}.mlp.up_proj.weight"] @ x
    act = gate * sigmoid(gate)
    if spec.gemma:
        act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return w[f"{spec.prefix}.mlp.down_proj.weight"] @ (act * up)


def eagle_chain(
    spec: EagleSpec,
    w: Tensors,
    table: Array,
    taps: Array,
    tokens: list[int],
    anchor: int,
    n_drafts: int,
    choose: Callable[[int], int],
) -> list[Array]:
    """Logits over the draft vocabulary of each step.

    Args:
        spec: The head.
        w: Its tensors.
        table: Embedding table.
        taps: Of all N committed rows.
        tokens: The N committed ids.
        anchor: The token at position N.
        n_drafts: Steps.
        choose: TARGET id that a step settles on.
    """
    states = list(fuse(spec, w, taps))
    ids = list(tokens) if spec.same_index else [*tokens[1:], anchor]
    logits = []
    for step in range(n_drafts):
        out = layer(spec, w, np.stack(states), table[ids] * spec.embed_scale)
        normed = rms(out, w["norm.weight"], spec.eps)
        row = w["lm_head.weight"] @ normed
        if spec.softcap is not None:
            row = spec.softcap * np.tanh(row / spec.softcap)
        logits.append(row)
        fed = normed if spec.norm_output else out
        if spec.fc_twice:
            fed = w["fc.weight"] @ np.tile(fed, 3)
        states.append(fed)
        ids.append(choose(step))
    return logits
