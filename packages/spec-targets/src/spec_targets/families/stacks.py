"""Model types that need nothing but the names of their parts, by mlx-lm module.

Windowed and mixture-of-experts models are here too: the cache entries that mlx-lm makes for them
say which layers have a window, and experts change nothing for rollback.
"""

from typing import Any

import mlx.core as mx

from spec_targets.families.layout import Layout, StackFamily, part

_LIKE_LLAMA = """
afmoe apertus cohere cohere2 deepseek deepseek_v2 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
gemma gemma2 gemma3_text gemma4_text glm glm4 glm4_moe gpt_oss granite granitemoe helium hunyuan
hunyuan_v1_dense internlm3 Klear laguna llama mellum mimo mimo_v2_flash minicpm minicpm3
minimax ministral3 mixtral muse_glimmer nemotron nemotron-nas olmo2 olmo3 olmoe phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 step3p5 telechat3
youtu_llm
""".split()
_INSIDE_A_MULTIMODAL_MODEL = """
gemma3 gemma4 llama4 mistral3 pixtral qwen2_vl qwen3_vl qwen3_vl_moe
""".split()


class NanbeigeFamily(StackFamily):
    """nanbeige: all layers run several times, with the final norm after every loop."""

    def between_loops(self, model: Any, hidden: mx.array) -> mx.array:
        """The final norm, unless the checkpoint leaves it out between loops."""
        skipped = part(self.backbone(model), "skip_loop_final_norm")
        return hidden if skipped else self.norm(model, hidden)


class TalkieFamily(StackFamily):
    """talkie: the head is a bare matrix."""

    def raw_head(self, model: Any, hidden: mx.array) -> mx.array:
        """Logits before the learned gain."""
        return hidden @ part(model, self.layout.head).T


STACKS: dict[str, StackFamily] = {
    **{name: StackFamily() for name in _LIKE_LLAMA},
    **{name: StackFamily(Layout(owner="language_model")) for name in _INSIDE_A_MULTIMODAL_MODEL},
    "bailing_moe": StackFamily(Layout(embedding="word_embeddings")),
    "dbrx": StackFamily(
        Layout(backbone="transformer", layers="blocks", embedding="wte", norm="norm_f")
    ),
    "exaone": StackFamily(Layout(backbone="transformer", layers="h", embedding="wte", norm="ln_f")),
    "gemma3n": StackFamily(Layout(owner="model", backbone="language_model")),
    "gpt2": StackFamily(Layout(layers="h", embedding="wte", norm="ln_f")),
    "gpt_bigcode": StackFamily(
        Layout(backbone="transformer", layers="h", embedding="wte", norm="ln_f")
    ),
    "gptj": StackFamily(Layout(layers="h", embedding="wte", norm="ln_f")),
    "internlm2": StackFamily(Layout(embedding="tok_embeddings", head="output")),
    "llama4_text": StackFamily(Layout(head="output")),
    "nanbeige": NanbeigeFamily(Layout(loops="num_loops")),
    "nanochat": StackFamily(Layout(backbone="transformer", layers="h", embedding="wte", norm=None)),
    "openelm": StackFamily(Layout(backbone="transformer", embedding="token_embeddings")),
    "phi": StackFamily(Layout(norm="final_layernorm")),
    "plamo": StackFamily(Layout(layers="layers.layers")),
    "plamo3": StackFamily(Layout(layers="layers.layers")),
    "qwen": StackFamily(Layout(backbone="transformer", layers="h", embedding="wte", norm="ln_f")),
    "spark2_5": StackFamily(Layout(embedding="embedding")),
    "talkie": TalkieFamily(Layout(layers="blocks", embedding="embed", norm=None)),
}
