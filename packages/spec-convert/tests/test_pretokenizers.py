import json

import pytest
from tokenizers import Tokenizer

from spec_convert.errors import ConvertError
from spec_convert.pretokenizers import byte_level_rules


def words(name: str, text: str) -> list[str]:
    """How a rule cuts a text, seen through a vocabulary that has no merges."""
    rules = byte_level_rules(name)
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": rules.normalizer, "pre_tokenizer": rules.pre_tokenizer,
        "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {"x": 0}, "merges": []},
    }  # fmt: skip
    cutter = Tokenizer.from_str(json.dumps(document)).pre_tokenizer
    data = text.encode()
    assert cutter is not None
    return [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)] if data else []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll pay 1234 €", ["I", "'ll", " pay", " 1234", " €"]),
        ("smollm", "I'll pay 1234", ["I", "'ll", " pay", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL pay 12345.\n\n", ["I", "'LL", " pay", " ", "123", "45", ".\n\n"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("qwen2", "नम", ["नम"]),
        ("qwen2", "का", ["क", "ा"]),
        ("qwen35", "का", ["का"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "it's HTTPServer 1234", ["it's", " HTTPServer", " ", "123", "4"]),
        (
            "deepseek-v3",
            "x=foo 日本語abc 1234",
            ["x", "=foo", " ", "日本語", "abc", " ", "123", "4"],
        ),
    ],
)
def test_text_is_cut_as_the_model_family_cuts_it(name, text, expected):
    assert words(name, text) == expected


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ConvertError, match='pre-tokeniser "default".*Known: .*"qwen2"'):
        byte_level_rules("default")
