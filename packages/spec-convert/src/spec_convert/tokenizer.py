"""GGUF vocabularies to `tokenizer.json` and `tokenizer_config.json`.

Two kinds exist: byte-level BPE with a named pre-tokeniser, and SentencePiece pieces with scores.
Special tokens keep their ids and are matched in raw text before anything else, as llama.cpp
does. Knows nothing about weights; needs no tokeniser library.

References:
    GGUF specification, section "Tokenizer"; Hugging Face `tokenizers` file format 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_convert.errors import ConvertError, quote
from spec_convert.metadata import Metadata
from spec_convert.pretokenizers import byte_level_rules

Json = dict[str, Any]
Merge = list[str]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


def tokenizer_files(metadata: Metadata) -> dict[str, Json]:
    """Tokeniser files of the output.

    Args:
        metadata: metadata of the file.

    Returns:
        File name to content: `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ConvertError: the vocabulary is missing, of an unknown kind, or contradicts itself.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _MODELS:
        known = ", ".join(f'"{name}"' for name in sorted(_MODELS))
        raise ConvertError(
            f"[tokenizer] The vocabulary must be of kind {known}, got {quote(kind)}. "
            "Convert with --no-tokenizer and copy the tokenizer files of the original model."
        )
    tokens, types = _vocabulary(metadata)
    parts = _MODELS[kind](metadata, tokens, types)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(metadata, tokens, parts["add_bos"]),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    return {"tokenizer.json": document, "tokenizer_config.json": _config(metadata, tokens)}


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not tokens:
        raise ConvertError(
            '[tokenizer] The file must hold "tokenizer.ggml.tokens", which is missing. '
            "Convert with --no-tokenizer and copy the tokenizer files of the original model."
        )
    if len(types) != len(tokens):
        raise ConvertError(
            f'[tokenizer] "tokenizer.ggml.token_type" must have {len(tokens)} entries, '
            f"got {len(types)}. The file is damaged."
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise ConvertError(
            f"[tokenizer] Tokens must be unique, got {quote(twice)} twice. The file is damaged."
        )
    return tokens, types


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER) and token
    ]


def _token(metadata: Metadata, tokens: Sequence[str], key: str) -> str | None:
    token_id = metadata.integer(f"tokenizer.ggml.{key}", None)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ConvertError(
            f'[tokenizer] "tokenizer.ggml.{key}" must be 0..{len(tokens) - 1}, got {token_id}. '
            "The file is damaged."
        )
    return tokens[token_id]


def _post_processor(metadata: Metadata, tokens: Sequence[str], add_bos: bool) -> Json | None:
    template: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
    specials: Json = {}
    wanted = (
        ("bos_token_id", metadata.flag("tokenizer.ggml.add_bos_token", add_bos), True),
        ("eos_token_id", metadata.flag("tokenizer.ggml.add_eos_token", False), False),
    )
    for key, used, in_front in wanted:
        token = _token(metadata, tokens, key) if used else None
        if token is None:
            continue
        token_id = metadata.integer(f"tokenizer.ggml.{key}")
        specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        for sequence in (template, pair):
            piece = {"SpecialToken": {"id": token, "type_id": 0}}
            sequence.insert(0 if in_front else len(sequence), piece)
    if not specials:
        return None
    return {
        "type": "TemplateProcessing",
        "single": template,
        "pair": pair,
        "special_tokens": specials,
    }


def _config(metadata: Metadata, tokens: Sequence[str]) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 40,
    }
    arch = metadata.text("general.architecture", "")
    config["model_max_length"] = metadata.integer(
        f"{arch}.context_length", config["model_max_length"]
    )
    for name, key in _NAMED_TOKENS.items():
        token = _token(metadata, tokens, key)
        if token is not None:
            config[name] = token
    template = _chat_template(metadata)
    return config | ({"chat_template": template} if template else {})


def _chat_template(metadata: Metadata) -> str | list[Json] | None:
    """The template, or all of them by name where a file has several."""
    default = metadata.text("tokenizer.chat_template", None)
    named = [
        {"name": name, "template": metadata.text(f"tokenizer.chat_template.{name}")}
        for name in metadata.texts("tokenizer.chat_templates")
    ]
    if not named:
        return default
    return [{"name": "default", "template": default}, *named] if default else named


def _byte_level_bpe(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Json:
    rules = byte_level_rules(metadata.text("tokenizer.ggml.pre", "default"))
    # Special tokens too: `tokenizers` renumbers added tokens that the model does not list.
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges(metadata, vocab)
    return {
        "normalizer": rules.normalizer,
        "pre_tokenizer": rules.pre_tokenizer,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "add_bos": rules.add_bos,
        "model": _bpe_model(vocab, merges, ignore_merges=rules.ignore_merges),
    }


def _merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[Merge]:
    """Stated merges in their order; every part and result is a token."""
    merges = [_split_merge(text) for text in metadata.texts("tokenizer.ggml.merges")]
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ConvertError(
                f"[tokenizer] Parts and result of the merge {quote(left + ' ' + right)} must be "
                "tokens. The file is damaged or its vocabulary was edited."
            )
    return merges


def _split_merge(text: str) -> Merge:
    left, found, right = text.partition(" ")
    if not found or not left or not right:
        raise ConvertError(
            f"[tokenizer] A merge must be two tokens with a space between, got {quote(text)}."
        )
    return [left, right]


def _bpe_model(vocab: Mapping[str, int], merges: Sequence[Merge], **changes: object) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **changes,
        "vocab": vocab,
        "merges": merges,
    }


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Json:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConvertError(
            f'[tokenizer] "tokenizer.ggml.scores" must have {len(tokens)} entries, '
            f"got {len(scores)}. The file is damaged."
        )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    merges = _merges_by_score(tokens, types, scores)
    return _piece_rules(metadata, tokens, types, merges, prefix)


def _ranked_pieces(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Json:
    """Pieces as SentencePiece writes them, with merges in the order they apply."""
    merges = _merges(metadata, {token: token_id for token_id, token in enumerate(tokens)})
    rules = _piece_rules(metadata, tokens, types, merges, prefix=False)
    newlines = {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated"}
    return rules | {"pre_tokenizer": {**newlines, "invert": False}}


def _piece_rules(
    metadata: Metadata,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[Merge],
    prefix: bool,
) -> Json:
    """Rules of a vocabulary whose pieces hold a visible mark for each space."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: Json = replace
    if prefix:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "add_bos": True,
        "model": _bpe_model(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            unk_token=_token(metadata, tokens, "unknown_token_id"),
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        ),
    }


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[Merge]:
    """Every way to form a piece from two pieces, best score first.

    SentencePiece joins the neighbours whose joined piece scores highest, so the score of the
    result is the rank of the merge. Ways to form one piece are tried longest left part first, as
    in the files that `transformers` writes.
    """
    usable = np.isin(np.asarray(types), (_NORMAL, _UNUSED))
    pieces = {token for token, good in zip(tokens, usable.tolist(), strict=True) if good}
    order = np.argsort(-np.asarray(scores), kind="stable")
    merges: list[Merge] = []
    for token_id in order[usable[order]].tolist():
        token = str(tokens[token_id])
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append([left, right])
    return merges


_MODELS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece, "gemma4": _ranked_pieces}
