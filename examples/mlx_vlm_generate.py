"""Speculative decoding inside mlx-vlm: the picture goes in with the prompt, drafts come after it.

    pip install spec-core spec-drafters mlx-vlm
    python examples/mlx_vlm_generate.py --image cat.jpg --prompt "What is this?"

The adapter is that of `mlx_lm_generate.py` with another forward: while the prompt is read, rows of
merged text and image embeddings stand in for ids. It serves models whose language model needs
nothing but embeddings (Idefics3, SmolVLM, LLaVA, ..); one that also needs positions of its own, as
Qwen2-VL does, is refused.
"""

import argparse
from typing import Any

import mlx.core as mx
from mlx_lm_generate import TrimCache, TrimTarget
from mlx_vlm.utils import load, prepare_inputs

from spec_core import LoadError, Pair, StatsMeter, generate
from spec_drafters import LookupDrafter

NEEDED = {"inputs_embeds", "attention_mask_4d"}


class VlmCache(TrimCache):
    """A sequence that begins with rows of embeddings."""

    def __init__(self, layers: list[Any], embeddings: mx.array) -> None:
        super().__init__(layers)
        self.embeddings = embeddings  # (1, N, H): the prompt with its pictures in place


class VlmTarget(TrimTarget):
    """A model of mlx-vlm behind the contract of spec-core.

    Args:
        model: The whole model; its language model does the decoding.
        embedding: The language model's embedding table.
        head: Its head; None where the embedding is tied.
    """

    tap_refusal = "models of mlx-vlm do not hand out the hidden states of their layers"

    def __init__(self, model: Any, embedding: Any, head: Any = None) -> None:
        self.whole = model
        super().__init__(model.language_model, embedding, head)

    def look(self, input_ids: mx.array, pixel_values: mx.array | None, **inputs: Any) -> VlmCache:
        """A cache for one prompt and its pictures.

        Args:
            input_ids: Shape (1, N), with the processor's placeholders for the pictures.
            pixel_values: As the processor gives them; None for text alone.
            inputs: What else the processor gave.
        """
        found = self.whole.get_input_embeddings(input_ids, pixel_values, **inputs)
        others = [n for n, v in vars(found).items() if v is not None and n not in NEEDED]
        if others:
            raise LoadError(f"[adapter] The model must need embeddings alone, got {others}.")
        return VlmCache(self.make_cache().layers, found.inputs_embeds)

    def forward(self, block: mx.array, cache: TrimCache) -> mx.array:
        """Embeddings while the prompt lasts, ids after it."""
        start, end = cache.offset, cache.offset + block.shape[0]
        rows = None
        if isinstance(cache, VlmCache) and end <= cache.embeddings.shape[1]:
            rows = cache.embeddings[:, start:end]
        return self.model(block[None], inputs_embeds=rows, cache=cache.layers).logits


def main() -> None:
    """Answer a question about a picture and say how much the drafts saved."""
    parser = argparse.ArgumentParser(description="Lookup drafts in mlx-vlm.")
    parser.add_argument("--model", default="mlx-community/SmolVLM-256M-Instruct-bf16")
    parser.add_argument("--image", required=True)
    parser.add_argument("--prompt", default="Describe this picture.")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    model, processor = load(options.model)
    content = [{"type": "image"}, {"type": "text", "text": options.prompt}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = prepare_inputs(processor, images=[options.image], prompts=text)
    language = model.language_model
    target = VlmTarget(model, language.embed_tokens, getattr(language, "lm_head", None))
    cache = target.look(**{k: v for k, v in inputs.items() if k != "attention_mask"})
    ids = inputs["input_ids"][0].tolist()
    meter, tokens = StatsMeter(), list[int]()
    pair, stops = Pair(target, LookupDrafter()), (processor.tokenizer.eos_token_id,)
    for round_ in generate(pair, ids, max_tokens=options.max_tokens, stop_ids=stops, cache=cache):
        meter.add(round_)
        tokens += round_.tokens
    print(processor.tokenizer.decode(tokens, skip_special_tokens=True))
    stats = meter.result()
    print(f"[{stats.n_tokens} tokens in {stats.n_rounds} rounds, {stats.n_accepted} from drafts]")


if __name__ == "__main__":
    main()
