"""Texts and templates that no tokenizer can take, refused in one line."""

from types import SimpleNamespace

import pytest

from spec_core import SpecError
from spec_targets.tokenizer import HfTokenizer


class Words:
    """One id per character; a template that refuses what it is told to."""

    bos_token = None

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal

    def encode(self, text, add_special_tokens):
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
