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


def _split(*patterns: str) -> Json:
    """Each pattern in turn cuts what the one before left whole."""
    rules: list[Json] = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in patterns
    ]
    return _sequence(*rules, _byte_level(use_regex=False))


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str, marks: str = "") -> str:
    """Words, numbers and punctuation as Llama 3 and Qwen cut them.

    Args:
        numbers: how many digits stay together.
        marks: class of combining marks that belong to letters.
    """
    letters = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(numbers: str, ending: str = "") -> str:
    """As `_words`, but a word also ends where lower case turns to upper case.

    Args:
        numbers: how many digits stay together.
        ending: optional pattern of a contraction behind a word.
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_ASCII_PUNCTUATION = "!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_ASCII_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_NFC: Json = {"type": "NFC"}
_THREES = r"\p{N}{1,3}"

_GPT2 = ByteLevelRules(_byte_level(use_regex=True))
_SMOLLM = ByteLevelRules(
    _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
)
_LLAMA3 = ByteLevelRules(_split(_words(_THREES)), ignore_merges=True, add_bos=True)
_DBRX = ByteLevelRules(_split(_words(_THREES)))
_QWEN2 = ByteLevelRules(_split(_words(r"\p{N}")), normalizer=_NFC)
_QWEN35 = ByteLevelRules(_split(_words(r"\p{N}", marks=r"\p{M}")), normalizer=_NFC)
_TEKKEN = ByteLevelRules(_split(_cased_words(r"\p{N}")), ignore_merges=True, add_bos=True)
_GPT4O = ByteLevelRules(_split(_cased_words(_THREES, f"{_CONTRACTIONS}?")))

_RULES = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "deepseek-v3": ByteLevelRules(_split(*_DEEPSEEK3)),
}
