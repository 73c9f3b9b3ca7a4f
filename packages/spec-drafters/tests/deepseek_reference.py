"""A second forward of the DeepSeek-V4 draft stages, and a V4 target, in NumPy from the equations.

Float64, no cache for drafts, one row at a time for the target, no code shared with the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from spec_core import StateError, TargetOutput

from . import deepseek_layouts as sizes

Array = np.ndarray
Tensors = dict[str, Array]
EPS = HC_EPS = 1e-6
THETA, LIMIT, SCALE = 10000.0, 4.0, 1.5


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms(x: Array, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rope(x: Array, position: int, sign: int = 1) -> Array:
    """Neighbours of the last dimensions in pairs, by the definition."""
    out, first = x.copy(), x.shape[-1] - sizes.ROPE
    angles = sign * position * THETA ** (-2 * np.arange(sizes.ROPE // 2) / sizes.ROPE)
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    out[..., first::2] = a * np.cos(angles) - b * np.sin(angles)
    out[..., first + 1 :: 2] = a * np.sin(angles) + b * np.cos(angles)
    return out


def mixes(x: Array, w: Tensors, name: str) -> tuple[Array, Array, Array]:
    """pre (T, hc), post (T, hc) and comb (T, hc, hc) of rows of copies (T, hc, D)."""
    hc = sizes.COPIES
    vectors = x.reshape(len(x), -1)
    # Row by row, so that a row's bits do not depend on the rows beside it.
    m = np.stack([w[f"{name}_fn"] @ v / np.sqrt((v**2).mean() + EPS) for v in vectors])
    scale, base = w[f"{name}_scale"], w[f"{name}_base"]
    pre = sigmoid(m[:, :hc] * scale[0] + base[:hc]) + HC_EPS
    post = 2 * sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    logits = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(-1, hc, hc)
    comb = np.exp(logits - logits.max(2, keepdims=True))
    comb = comb / comb.sum(2, keepdims=True) + HC_EPS
    comb = comb / (comb.sum(1, keepdims=True) + HC_EPS)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdims=True) + HC_EPS)
        comb = comb / (comb.sum(1, keepdims=True) + HC_EPS)
    return pre, post, comb


def read(x: Array, pre: Array, norm: Array) -> list[Array]:
    """What a sublayer reads of rows of copies."""
    return [rms(p @ row, norm) for p, row in zip(pre, x, strict=True)]


def expand(y: Sequence[Array], x: Array, post: Array, comb: Array) -> Array:
    """A sublayer's outputs added to the mixed copies; the old copy is comb's first index."""
    rows = zip(y, x, post, comb, strict=True)
    return np.stack([p[:, None] * out + c.T @ row for out, row, p, c in rows])


def key(w: Tensors, a: str, x: Array, position: int) -> Array:
    return rope(rms(w[f"{a}.wkv.weight"] @ x, w[f"{a}.kv_norm.weight"]), position)


def attend(w: Tensors, a: str, x: Array, position: int, keys: Array, head_norm: bool) -> Array:
    """One row over keys (K, hd)."""
    q = w[f"{a}.wq_b.weight"] @ rms(w[f"{a}.wq_a.weight"] @ x, w[f"{a}.q_norm.weight"])
    q = q.reshape(sizes.HEADS, sizes.HEAD_DIM)
    q = rope(rms(q) if head_norm else q, position)
    scores = np.exp(q @ keys.T / np.sqrt(sizes.HEAD_DIM))  # (heads, K)
    sink = np.exp(w[f"{a}.attn_sink"])
    out = scores @ keys / (scores.sum(1) + sink)[:, None]
    out = rope(out, position, -1).reshape(sizes.GROUPS, -1)
    down = w[f"{a}.wo_a.weight"].reshape(sizes.GROUPS, sizes.O_RANK, -1)
    latent = np.concatenate([down[g] @ out[g] for g in range(sizes.GROUPS)])
    return w[f"{a}.wo_b.weight"] @ latent


def expert(w: Tensors, p: str, x: Array) -> Array:
    gate = np.minimum(w[f"{p}.w1.weight"] @ x, LIMIT)
    up = np.clip(w[f"{p}.w3.weight"] @ x, -LIMIT, LIMIT)
    return w[f"{p}.w2.weight"] @ (gate * sigmoid(gate) * up)


def mixture(w: Tensors, f: str, x: Array, token: int, k: int, temperature: float) -> Array:
    scores = np.sqrt(np.log1p(np.exp(w[f"{f}.gate.weight"] @ x / temperature)))
    if f"{f}.gate.tid2eid" in w:
        chosen = w[f"{f}.gate.tid2eid"][token]
    else:
        chosen = np.argsort(-(scores + w[f"{f}.gate.bias"]))[:k]
    share = scores[chosen] / scores[chosen].sum() * SCALE
    routed = sum(s * expert(w, f"{f}.experts.{e}", x) for s, e in zip(share, chosen, strict=True))
    return routed + expert(w, f"{f}.shared_experts", x)


@dataclass
class Drafted:
    """What the stages make of a block."""

    streams: list[Array]  # (B, hc, D) after each stage
    rows: Array  # (B, D), before the final norm
    logits: Array  # (B, V), before the Markov bias


def draft_block(
    b: sizes.Bundle, taps: Array, anchor: int, embedding: Array, head: Array
) -> Drafted:
    """The block behind committed rows with taps (N, 3 D)."""
    w, v4, n = b.values, b.generation == "v4", len(taps)
    k, temperature = (sizes.ACTIVE, 1.0) if v4 else (sizes.DRAFT_ACTIVE, 1.25)
    ids = [anchor] + [sizes.MASK] * (sizes.BLOCK - 1)
    main = rms(taps @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"])
    seen = range(max(0, n - sizes.WINDOW), n)
    x = np.stack([np.tile(embedding[i], (sizes.COPIES, 1)) for i in ids])  # (B, hc, D)
    lag = np.zeros((sizes.BLOCK, sizes.COPIES))
    lag[:, 0] = 1
    streams = []
    for stage in range(sizes.N_STAGES):
        p, a = f"mtp.{stage}", f"mtp.{stage}.attn"
        pre, post, comb = mixes(x, w, f"{p}.hc_attn")
        u = read(x, pre if v4 else lag, w[f"{p}.attn_norm.weight"])
        keys = [key(w, a, main[i], i) for i in seen]
        keys = np.stack(keys + [key(w, a, row, n + i) for i, row in enumerate(u)])
        y = [attend(w, a, row, n + i, keys, v4) for i, row in enumerate(u)]
        x = expand(y, x, post, comb)
        lag, post, comb = mixes(x, w, f"{p}.hc_ffn")
        u = read(x, lag if v4 else pre, w[f"{p}.ffn_norm.weight"])
        y = [mixture(w, f"{p}.ffn", r, i, k, temperature) for r, i in zip(u, ids, strict=True)]
        x = expand(y, x, post, comb)
        streams.append(x)
    last = f"mtp.{sizes.N_STAGES - 1}"
    if v4:
        rows = np.stack([collapsed(row, w, f"{last}.") for row in x])
    else:
        rows = (lag[:, :, None] * x).sum(1)
    return Drafted(streams, rows, rms(rows, w[f"{last}.norm.weight"]) @ head.T)


def collapsed(x: Array, w: Tensors, prefix: str) -> Array:
    vec = x.reshape(-1)
    m = w[f"{prefix}hc_head_fn"] @ vec / np.sqrt((vec**2).mean() + EPS)
    pre = sigmoid(m * w[f"{prefix}hc_head_scale"] + w[f"{prefix}hc_head_base"]) + HC_EPS
    return pre @ x


def chain(
    b: sizes.Bundle, drafted: Drafted, anchor: int, pick: Callable[[int, Array], int]
) -> tuple[list[int], Array, Array]:
    """Tokens, logits with the Markov bias (B, V), and confidence (B,)."""
    w, p = b.values, f"mtp.{sizes.N_STAGES - 1}"
    names = ("markov_w1", "markov_w2") if b.generation == "v4" else ("embed", "head")
    before, after = (w[f"{p}.markov_head.{name}.weight"] for name in names)
    tokens, logits, chances, previous = [], [], [], anchor
    for i in range(sizes.BLOCK):
        logits.append(drafted.logits[i] + after @ before[previous])
        read = np.concatenate([drafted.rows[i], before[previous]])
        chances.append(sigmoid(w[f"{p}.confidence_head.proj.weight"][0] @ read))
        previous = pick(i, logits[-1])
        tokens.append(previous)
    return tokens, np.stack(logits), np.array(chances)


@dataclass
class NumpyCache:
    """Keys of every layer, row by row, and how many of the rows are committed."""

    keys: list[list[Array]] = field(default_factory=lambda: [[] for _ in range(sizes.DEPTH)])
    n_open: int = 0
    nbytes: int = 0

    @property
    def offset(self) -> int:
        return len(self.keys[0]) - self.n_open

    @property
    def is_open(self) -> bool:
        return self.n_open > 0


class NumpyTarget:
    """A V4 target whose layers all have the window alone: hash and score routing, V4 mixes."""

    vocab_size, hidden_size, n_layers = sizes.VOCAB, sizes.HIDDEN, sizes.DEPTH
    context_length = tap_refusal = exact_refusal = None

    def __init__(self, b: sizes.Bundle) -> None:
        self.w = b.values
        self.table = mx.array(b.values["embed.weight"].astype(np.float32))
        self.matrix = mx.array(b.values["head.weight"].astype(np.float32))

    def make_cache(self) -> NumpyCache:
        return NumpyCache()

    def prefill(
        self, tokens: Sequence[int], cache: NumpyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        output = self.verify(mx.array(list(tokens), mx.int32), cache, taps=taps)
        self.commit(cache, len(tokens))
        return TargetOutput(output.logits[-1:], output.taps)

    def verify(
        self, block: mx.array, cache: NumpyCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        if cache.is_open:
            raise StateError("a block is open")
        tokens: Any = block.tolist()
        w, first, seen = self.w, cache.offset, {}
        x = np.stack([np.tile(w["embed.weight"][t], (sizes.COPIES, 1)) for t in tokens])
        for layer in range(sizes.DEPTH):
            p, a, rows = f"layers.{layer}", f"layers.{layer}.attn", cache.keys[layer]
            pre, post, comb = mixes(x, w, f"{p}.hc_attn")
            y = []
            for i, u in enumerate(read(x, pre, w[f"{p}.attn_norm.weight"])):
                rows.append(key(w, a, u, first + i))
                y.append(attend(w, a, u, first + i, np.stack(rows[-sizes.WINDOW :]), True))
            x = expand(y, x, post, comb)
            pre, post, comb = mixes(x, w, f"{p}.hc_ffn")
            pairs = zip(read(x, pre, w[f"{p}.ffn_norm.weight"]), tokens, strict=True)
            y = [mixture(w, f"{p}.ffn", row, t, sizes.ACTIVE, 1.0) for row, t in pairs]
            x = expand(y, x, post, comb)
            seen[layer] = mx.array(x.mean(1).astype(np.float32))
        cache.n_open = len(tokens)
        z = [rms(collapsed(row, w, ""), w["norm.weight"]) for row in x]
        logits = np.stack([w["head.weight"] @ row for row in z])
        return TargetOutput(mx.array(logits.astype(np.float32)), tuple(seen[i] for i in taps))

    def commit(self, cache: NumpyCache, n_keep: int) -> None:
        if not cache.is_open:
            raise StateError("no block is open")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError("rows out of range")
        n = cache.offset + n_keep
        cache.keys, cache.n_open = [rows[:n] for rows in cache.keys], 0

    def embed(self, tokens: mx.array) -> mx.array:
        return self.table[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        return hidden @ self.matrix.T


def taught(b: sizes.Bundle, target: Any = None) -> sizes.Bundle:
    """The same checkpoint with drafts that are often right, on a target that is near a bigram.

    The Markov head holds the target's mean logits after each token; what the stages say is turned
    down.

    Args:
        b: A checkpoint whose table outweighs what layers add to its rows.
        target: Its target; a NumPy one without.
    """
    n, last = sizes.VOCAB, f"mtp.{sizes.N_STAGES - 1}"
    target = target or NumpyTarget(b)
    text = np.concatenate([np.arange(n), np.random.default_rng(0).integers(0, n, 240)])
    block = mx.array(text.astype(np.int32))
    logits = np.array(target.verify(block, target.make_cache()).logits.astype(mx.float32))
    means = np.stack([logits[text == token].mean(0) for token in range(n)])
    first, second = ("markov_w1", "markov_w2") if b.generation == "v4" else ("embed", "head")
    b.plain(f"{last}.markov_head.{first}.weight", np.eye(n))
    b.plain(f"{last}.markov_head.{second}.weight", means.T)
    b.plain(f"{last}.norm.weight", 0.1 * b.values[f"{last}.norm.weight"])
    confidence = 0.05 * b.rng.normal(size=(1, sizes.HIDDEN + n))
    b.plain(f"{last}.confidence_head.proj.weight", confidence)
    return b
