"""Every architecture with rules, by the name a GGUF file gives it."""

from __future__ import annotations

from spec_convert.errors import ConvertError, quote
from spec_convert.families.drafters import BONSAI, DFLASH, EAGLE3
from spec_convert.families.gemma import GEMMA2, GEMMA3, GEMMA4
from spec_convert.families.hybrid import LFM2, NEMOTRON_H, NEMOTRON_H_MOE, QWEN35, QWEN35MOE
from spec_convert.families.llama import LLAMA, MISTRAL3
from spec_convert.families.phi import PHI3
from spec_convert.families.qwen import QWEN2, QWEN3, QWEN3MOE
from spec_convert.metadata import Metadata
from spec_convert.names import Architecture

ARCHITECTURES = {
    rules.name: rules
    for rules in (
        LLAMA, MISTRAL3, QWEN2, QWEN3, QWEN3MOE, QWEN35, QWEN35MOE, GEMMA2, GEMMA3, GEMMA4,
        LFM2, NEMOTRON_H, NEMOTRON_H_MOE, PHI3, BONSAI, DFLASH, EAGLE3,
    )
}  # fmt: skip


def architecture_of(metadata: Metadata) -> Architecture:
    """The rules for a file.

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
