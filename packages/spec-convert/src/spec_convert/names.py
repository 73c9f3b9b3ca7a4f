"""What a tensor is called in a Hugging Face folder, and what changes on the way there.

One table per GGUF architecture. Row orders and value shifts are stated here and applied
elsewhere. Knows nothing about storage types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spec_convert.errors import ConvertError, quote
from spec_convert.metadata import Metadata

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Slot:
    """Where one GGUF tensor goes.

    Attributes:
        name: parameter name in the output.
        interleaved_heads: when not 0, rows come in this many heads with the two halves of each
            rotary pair next to each other, and must return to the half-split order.
        shift: added to every value; -1 for norms stored with their offset.
        embedding: a table that is also read row by row, not only multiplied.
    """

    name: str
    interleaved_heads: int = 0
    shift: float = 0.0
    embedding: bool = False


@dataclass(frozen=True)
class Architecture:
    """Naming rules of one GGUF architecture.

    Attributes:
        name: value of `general.architecture`, also the prefix of its metadata keys.
        top: GGUF tensor name to output name, outside the layers.
        layer: the same inside a layer, without `blk.N.` and `model.layers.N.`.
        interleaved: q and k rows are stored for interleaved rotary embedding.
        norm_shift: added to every norm weight.
        dropped: tensors that carry nothing the output needs.
    """

    name: str
    top: Mapping[str, str]
    layer: Mapping[str, str]
    interleaved: bool = False
    norm_shift: float = 0.0
    dropped: frozenset[str] = field(default_factory=frozenset)

    def slot(self, tensor: str, metadata: Metadata) -> Slot | None:
        """Where `tensor` goes; None when it is dropped.

        Raises:
            ConvertError: the architecture has no such tensor.
        """
        if tensor in self.dropped:
            return None
        stem, dot, suffix = tensor.rpartition(".")
        match = _LAYER.fullmatch(stem)
        known = self.layer.get(match[2]) if match else self.top.get(stem)
        if known is None or not dot or suffix not in ("weight", "bias"):
            raise ConvertError(
                f"[names] Architecture {quote(self.name)} has no tensor {quote(tensor)}. "
                "Update spec-convert, or use --raw-names to keep GGUF names."
            )
        prefix = f"model.layers.{int(match[1])}." if match else ""
        heads = self._heads(match[2], metadata) if match else 0
        is_norm = known.endswith("norm") and suffix == "weight"
        return Slot(
            f"{prefix}{known}.{suffix}",
            interleaved_heads=heads,
            shift=self.norm_shift if is_norm else 0.0,
            embedding=stem == "token_embd",
        )

    def _heads(self, part: str, metadata: Metadata) -> int:
        if not self.interleaved or part not in ("attn_q", "attn_k"):
            return 0
        heads = metadata.integer(f"{self.name}.attention.head_count")
        if part == "attn_q":
            return heads
        return metadata.integer(f"{self.name}.attention.head_count_kv", heads)


_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "llama",
            top=_TOP,
            layer=_DENSE | {"ffn_norm": "post_attention_layernorm"},
            interleaved=True,
        ),
        Architecture(
            "gemma3",
            top=_TOP,
            layer=_DENSE
            | {
                "attn_q_norm": "self_attn.q_norm",
                "attn_k_norm": "self_attn.k_norm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            norm_shift=-1.0,
        ),
    )
}


def architecture_of(metadata: Metadata) -> Architecture:
    """The naming rules for a file.

    Raises:
        ConvertError: the architecture is missing or has no rules here.
    """
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(f'"{known}"' for known in sorted(ARCHITECTURES))
        raise ConvertError(
            f"[names] No rules for architecture {quote(name)}. Known: {known}. "
            "Use --raw-names to keep GGUF tensor names."
        )
    return ARCHITECTURES[name]
