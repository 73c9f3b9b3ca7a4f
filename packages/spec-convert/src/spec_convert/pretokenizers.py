"""How byte-level BPE vocabularies cut text into words, by the name a GGUF file gives.

Each name stands for the rule set of one model family, as published in that family's own
`tokenizer.json`. Knows nothing about vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_convert.errors import ConvertError, quote

Json = dict[str, Any]


@dataclass(frozen=True)
class ByteLevelRules:
    """Text handling around a byte-level BPE model.

    Attributes:
        pre_tokenizer: `pre_tokenizer` section of `tokenizer.json`.
        normalizer: `normalizer` section, or None.
        ignore_merges: a word that is a token is taken whole, whatever the merges say.
        add_bos: a text starts with the begin token unless the file says otherwise.
    """

    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def byte_level_rules(name: str) -> ByteLevelRules:
    """Rules for a value of `tokenizer.ggml.pre`.

    Raises:
        ConvertError: the name is unknown.
    """
    if name not in _RULES:
        known = ", ".join(f'"{known}"' for known in sorted(_RULES))
        raise ConvertError(
            f"[tokenizer] No rules for pre-tokeniser {quote(name)}. Known: {known}. "
            "Convert with --no-tokenizer and copy the tokenizer files of the original model."
        )
    return _RULES[name]


def _byte_level(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> Json:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return _sequence({**rule, "invert": False}, _byte_level(use_regex=False))


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _words(numbers: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """The word pattern that Llama 3 and Qwen share, but for numbers and combining marks."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{letters}+"
        rf"|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = ByteLevelRules(_byte_level(use_regex=True))
_SMOLLM = ByteLevelRules(
    _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
)
_LLAMA3 = ByteLevelRules(_split(_words(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)
_QWEN2 = ByteLevelRules(_split(_words(r"\p{N}")), normalizer={"type": "NFC"})

_RULES = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
