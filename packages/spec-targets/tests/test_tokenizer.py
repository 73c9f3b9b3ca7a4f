"""Texts and templates that no tokenizer can take; the tokens that end a text."""

import json
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spec_core import LoadError, Pair, SpecError, generate
from spec_core.testing import ToyDrafter
from spec_targets import load_target
from spec_targets.tiny import build, tiny_config
from spec_targets.tokenizer import HfTokenizer


class Words:
    """One id per character; a template that refuses what it is told to."""

    bos_token = bos_token_id = None

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def apply_chat_template(self, messages, **options):
        if self.refusal is not None:
            raise ValueError(self.refusal)
        return self.encode("".join(m["content"] for m in messages), True)


def tokenizer(refusal=None):
    inner = Words(refusal)
    return HfTokenizer(SimpleNamespace(_tokenizer=inner, eos_token_ids=[2], has_chat_template=True))


def test_half_a_surrogate_pair_is_refused_by_name():
    for call in (
        lambda: tokenizer().encode("a\ud800"),
        lambda: tokenizer().encode_chat([{"role": "user", "content": "\udfff"}]),
    ):
        with pytest.raises(SpecError, match="half a surrogate pair"):
            call()
    assert tokenizer().encode("\U0001f600") == [0x1F600]


def test_what_a_template_says_becomes_one_short_line():
    with pytest.raises(SpecError) as error:
        tokenizer("no\n\nway\n" + "x" * 5000).encode_chat([{"role": "user", "content": "hi"}])
    message = str(error.value)
    assert "refused the messages: no way x" in message
    assert len(message.splitlines()) == 1 and len(message) < 500


def checkpoint(folder, config, generation=None):
    """A tiny model with a real tokenizer of single letters, whose own end token is "</s>"."""
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abcdefgh")}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    fast.save_pretrained(folder)
    described = {**tiny_config("llama"), **config}
    weights = dict(tree_flatten(build(tiny_config("llama")).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(described))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({}, None, {8}),
        ({"eos_token_id": 3}, None, {3, 8}),
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, {3, 4, 5, 8}),
        ({"eos_token_id": [3, 6]}, {"eos_token_id": None}, {3, 6, 8}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {5, 8}),
        ({}, {"temperature": 0.6}, {8}),
    ],
)
def test_every_end_token_that_a_config_names_ends_a_text(tmp_path, config, generation, want):
    target, tokenizer = load_target(checkpoint(tmp_path, config, generation))
    assert tokenizer.stop_ids == want
    plain = generate(Pair(target), [1, 2], max_tokens=60, stop_ids=())
    ids = [t for r in plain for t in r.tokens]
    first = next((n for n, t in enumerate(ids) if t in want), 59)
    for pair in (Pair(target, None, tokenizer), Pair(target, ToyDrafter(61), tokenizer)):
        got = [t for r in generate(pair, [1, 2], max_tokens=60) for t in r.tokens]
        assert got == ids[: first + 1]


def test_end_tokens_that_are_no_ids_are_refused(tmp_path):
    with pytest.raises(LoadError, match="\"eos_token_id\" .* must be a whole number .* got 'x'"):
        load_target(checkpoint(tmp_path, {}, {"eos_token_id": "x"}))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match='generation_config.json" must be JSON'):
        load_target(tmp_path)


class Starting(Words):
    """Puts a start token, "^", in front of raw texts, but for templates that leave it out."""

    bos_token, bos_token_id = "^", ord("^")

    def __init__(self, template: str, adds: bool) -> None:
        super().__init__()
        self.template, self.adds = template, adds

    def encode(self, text, add_special_tokens=True):
        start = "^" if add_special_tokens and self.adds else ""
        return [ord(c) for c in start + text]

    def apply_chat_template(self, messages, **options):
        return self.encode(self.template + messages[0]["content"], False)


@pytest.mark.parametrize(
    ("template", "adds", "want"),
    [("^<", True, "^<hi"), ("<", True, "^<hi"), ("^<", False, "^<hi"), ("<", False, "<hi")],
)
def test_a_conversation_has_its_start_token_once(template, adds, want):
    made = HfTokenizer(
        SimpleNamespace(
            _tokenizer=Starting(template, adds), eos_token_ids=[2], has_chat_template=True
        )
    )
    ids = made.encode_chat([{"role": "user", "content": "hi"}])
    assert "".join(map(chr, ids)) == want
    for text in ("hi", "^hi"):  # raw texts likewise
        assert "".join(map(chr, made.encode(text))).count("^") == (adds or text[0] == "^")


class InChannels(Words):
    """A vocabulary and a template, and how often the vocabulary was copied."""

    def __init__(self, template: str, tokens: tuple[str, ...]) -> None:
        super().__init__()
        self.chat_template, self.tokens, self.n_copies = template, tokens, 0

    def get_vocab(self):
        self.n_copies += 1
        return {token: 100 + i for i, token in enumerate(self.tokens)}


CHANNELS = "<|start|>assistant<|channel|>final<|message|>{{ content }}"
TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>")


@pytest.mark.parametrize(
    ("template", "tokens", "harmony", "stop_ids", "most_copies"),
    [
        (CHANNELS, TOKENS, True, {2, 103, 104}, 1),
        (CHANNELS, TOKENS[:4], True, {2, 103}, 1),
        (CHANNELS, TOKENS[2:], False, {2}, 1),
        ("<|im_start|>{{ content }}", TOKENS, False, {2}, 0),
        (None, TOKENS, False, {2}, 0),
    ],
)
def test_harmony_is_told_by_template_and_vocabulary_together(
    template, tokens, harmony, stop_ids, most_copies
):
    inner = InChannels(template, tokens)
    made = HfTokenizer(SimpleNamespace(_tokenizer=inner, eos_token_ids=[2]))
    assert (made.harmony, made.stop_ids) == (harmony, stop_ids)
    assert inner.n_copies <= most_copies
