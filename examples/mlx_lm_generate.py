"""Speculative decoding inside plain mlx-lm: its model, its tokenizer, its caches, no spec-targets.

    pip install spec-core spec-drafters mlx-lm
    python examples/mlx_lm_generate.py --model mlx-community/Qwen3-0.6B-4bit --prompt "a b c a b"

`TrimTarget` is the whole adapter. It serves models that keep every row; hybrid models and sliding
windows need the exact rollback of spec-targets, and are refused here.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load

from spec_core import LoadError, Pair, StateError, StatsMeter, TargetOutput, generate
from spec_drafters import LookupDrafter


class TrimCache:
    """mlx-lm's list of layer caches, and how many of the newest rows are not committed yet."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.n_rows = self.n_open = 0

    offset = property(lambda self: self.n_rows - self.n_open)
    is_open = property(lambda self: self.n_open > 0)
    nbytes = property(lambda self: sum(layer.nbytes for layer in self.layers))


class TrimTarget:
    """A model of mlx-lm behind the contract of spec-core.

    Args:
        model: Called as `model(tokens, cache=layers)`; gives logits of shape (1, T, V).
        embedding: Its embedding table.
        head: Its head; None where the embedding is tied.
        context_length: Most positions, if known.
    """

    tap_refusal = "plain mlx-lm models do not hand out the hidden states of their layers"
    exact_refusal = "an operation that this adapter did not examine"

    def __init__(
        self, model: Any, embedding: nn.Embedding, head: Any = None, context_length: Any = None
    ) -> None:
        self.model, self.embedding, self.head = model, embedding, head
        self.context_length: int | None = context_length
        self.n_layers = len(model.layers)
        hidden = self.embed(mx.array([0]))
        self.hidden_size, self.vocab_size = hidden.shape[-1], self.unembed(hidden).shape[-1]

    def make_cache(self) -> TrimCache:
        """An empty cache; refused where it could not be rolled back."""
        layers = make_prompt_cache(self.model)
        kinds = {type(layer).__name__ for layer in layers}
        if kinds != {"KVCache"}:  # a rotating cache can be trimmed too, but only until it is full
            raise LoadError(f"[adapter] Caches must be KVCache, got {kinds}. Use spec-targets.")
        return TrimCache(layers)

    def prefill(
        self, tokens: Sequence[int], cache: TrimCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """A chunk of the prompt; the last row's logits."""
        output = self.verify(mx.array(list(tokens)), cache, taps=taps)
        self.commit(cache, len(tokens))
        mx.eval([layer.state for layer in cache.layers])
        return TargetOutput(output.logits[-1:])

    def verify(
        self, block: mx.array, cache: TrimCache, *, taps: Sequence[int] = ()
    ) -> TargetOutput:
        """One forward over a block, left open."""
        if cache.is_open:
            raise StateError("[verify] The block before must be committed first.")
        logits = self.forward(block, cache)
        cache.n_open, cache.n_rows = block.shape[0], cache.n_rows + block.shape[0]
        return TargetOutput(logits[0])

    def forward(self, block: mx.array, cache: TrimCache) -> mx.array:
        """The runtime's own forward: (T,) -> (1, T, V)."""
        return self.model(block[None], cache=cache.layers)

    def commit(self, cache: TrimCache, n_keep: int) -> None:
        """Keep the first rows of the block, trim the rest."""
        if not cache.is_open:
            raise StateError("[commit] A block must be open.")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError(f"[commit] n_keep must be 0..{cache.n_open}, got {n_keep}.")
        trim_prompt_cache(cache.layers, cache.n_open - n_keep)
        cache.n_rows, cache.n_open = cache.offset + n_keep, 0

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the embedding table."""
        return self.embedding(tokens)

    def unembed(self, hidden: mx.array) -> mx.array:
        """The head alone."""
        return self.embedding.as_linear(hidden) if self.head is None else self.head(hidden)


def main() -> None:
    """Answer a prompt and say how much the drafts saved."""
    parser = argparse.ArgumentParser(description="Lookup drafts in plain mlx-lm.")
    parser.add_argument("--model", default="mlx-community/Qwen3-0.6B-4bit")
    parser.add_argument("--prompt", default="Repeat after me: to be, or not to be. To be, or not")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    model, tokenizer, *_ = load(options.model)
    target = TrimTarget(model, model.model.embed_tokens, getattr(model, "lm_head", None))
    text, meter = tokenizer.detokenizer, StatsMeter()
    ids, stops = tokenizer.encode(options.prompt), tuple(tokenizer.eos_token_ids)
    pair = Pair(target, LookupDrafter())
    for round_ in generate(pair, ids, max_tokens=options.max_tokens, stop_ids=stops):
        meter.add(round_)
        for token in round_.tokens:
            if token not in stops:
                text.add_token(token)
        print(text.last_segment, end="", flush=True)
    text.finalize()
    print(text.last_segment)
    stats = meter.result()
    print(f"[{stats.n_tokens} tokens in {stats.n_rounds} rounds, {stats.n_accepted} from drafts]")


if __name__ == "__main__":
    main()
