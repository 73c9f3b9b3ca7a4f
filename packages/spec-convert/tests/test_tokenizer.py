import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata
from spec_convert.tokenizer import tokenizer_files


def metadata(values: dict[str, Any]) -> Metadata:
    """Metadata as the container reader delivers it: numbers in numpy arrays."""
    arrays = {
        key: np.array(value)
        for key, value in values.items()
        if isinstance(value, list) and not isinstance(value[0], str)
    }
    return Metadata(values | arrays)


def load(values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata(values))["tokenizer.json"]))


def sentencepiece_values(**changes: Any) -> dict[str, Any]:
    pieces = {
        "<unk>": (0.0, 2), "<s>": (0.0, 3), "</s>": (0.0, 3), "  ": (-1000.0, 4),
        **{f"<0x{byte:02X}>": (0.0, 6) for byte in range(256)},
        "▁th": (-1.0, 1), "▁the": (-3.0, 1), "he": (-2.0, 1), "aa": (-4.0, 1), "aaa": (-5.0, 1),
        **{char: (-100.0 - index, 1) for index, char in enumerate("▁theaé日")},
        "▁t": (-0.5, 1),
    }  # fmt: skip
    values = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": [score for score, _ in pieces.values()],
        "tokenizer.ggml.token_type": [kind for _, kind in pieces.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return values | changes


def sentencepiece_reference(values: dict[str, Any], text: str) -> list[str]:
    """The rule of SentencePiece BPE, from its definition: join the best-scoring neighbours."""
    scores = dict(
        zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"], strict=True)
    )
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[joined], -index)
            for index in range(len(parts) - 1)
            if (joined := parts[index] + parts[index + 1]) in scores
        ]
        if not pairs:
            break
        index = -max(pairs)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    tokens: list[str] = []
    for part in parts:
        tokens += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return tokens


def test_byte_level_tokens_follow_the_merges(tiny_metadata):
    tokenizer = load(tiny_metadata)
    encoding = tokenizer.encode("hello wor 日")
    assert encoding.tokens[:5] == ["<|start|>", "hello", "Ġw", "or", "Ġ"]
    assert tokenizer.decode(encoding.ids) == "hello wor 日"


def test_token_ids_are_the_files_ids(tiny_metadata):
    tokenizer = load(tiny_metadata)
    for token_id, token in enumerate(tiny_metadata["tokenizer.ggml.tokens"]):
        assert tokenizer.token_to_id(token) == token_id


def test_control_tokens_are_found_in_text_and_hidden_when_decoding(tiny_metadata):
    tokenizer = load(tiny_metadata)
    ids = tokenizer.encode("<|start|>he<|end|>", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(token) for token in ids] == ["<|start|>", "he", "<|end|>"]
    assert tokenizer.decode(ids) == "he"


def test_the_begin_token_is_added_only_where_the_file_says_so(tiny_metadata):
    with_bos = load(tiny_metadata).encode("he").tokens
    without = load(tiny_metadata | {"tokenizer.ggml.add_bos_token": False}).encode("he").tokens
    both = load(tiny_metadata | {"tokenizer.ggml.add_eos_token": True}).encode("he").tokens
    assert (with_bos, without) == (["<|start|>", "he"], ["he"])
    assert both == ["<|start|>", "he", "<|end|>"]


def test_the_configuration_names_special_tokens_and_the_template(tiny_metadata):
    config = tokenizer_files(metadata(tiny_metadata))["tokenizer_config.json"]
    assert config["bos_token"] == "<|start|>"
    assert config["eos_token"] == "<|end|>"
    assert config["pad_token"] == "<pad>"
    assert config["chat_template"] == tiny_metadata["tokenizer.chat_template"]
    assert "unk_token" not in config


def test_named_chat_templates_are_kept_beside_the_default(tiny_metadata):
    named = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    config = tokenizer_files(metadata(tiny_metadata | named))["tokenizer_config.json"]
    assert config["chat_template"] == [
        {"name": "default", "template": tiny_metadata["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


@pytest.mark.parametrize(
    "text", ["the", " the the", "thethe", "aaaa", "aa aaa", "héé", "日本", "a  a", "\x00€", "tea"]
)
def test_pieces_are_joined_by_score(text):
    values = sentencepiece_values()
    wanted: list[str] = []
    for index, part in enumerate(text.split("  ")):
        wanted += ["  "] if index else []
        wanted += sentencepiece_reference(values, part)
    assert load(values).encode(text, add_special_tokens=False).tokens == wanted


def test_a_space_in_front_is_added_only_where_the_file_says_so():
    plain = load(sentencepiece_values()).encode("the").tokens
    prefixed = load(sentencepiece_values(**{"tokenizer.ggml.add_space_prefix": True}))
    assert plain == ["<s>", "t", "he"]
    assert prefixed.encode("the").tokens == ["<s>", "▁the"]
    assert prefixed.decode(prefixed.encode("the the").ids) == "the the"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, 'of kind "gemma4", "gpt2", "llama", got "rwkv"'),
        ({"tokenizer.ggml.pre": "new"}, 'pre-tokeniser "new".*--no-tokenizer'),
        ({"tokenizer.ggml.tokens": []}, '"tokenizer.ggml.tokens", which is missing'),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, '"a" twice'),
        ({"tokenizer.ggml.token_type": [1]}, "token_type.*got 1"),
        ({"tokenizer.ggml.merges": ["he"]}, 'two tokens with a space between, got "he"'),
        ({"tokenizer.ggml.merges": ["h xyz"]}, 'merge "h xyz"'),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id.*got 9999"),
        ({"tokenizer.ggml.scores": [1.0], "tokenizer.ggml.model": "llama"}, "scores.*got 1"),
    ],
)
def test_vocabularies_that_contradict_themselves_are_refused(tiny_metadata, changes, words):
    values = {key: value for key, value in (tiny_metadata | changes).items() if value != []}
    with pytest.raises(ConvertError, match=words):
        tokenizer_files(metadata(values))
