"""Bodies that would hold everybody up, or that are no JSON that this server reads."""

import json

import httpx
import pytest

from spec_server.bodies import MOST_VALUES
from spec_server.errors import PromptTooLong
from spec_server.prompts import Chat, Prompter
from spec_targets import load_target

CHAT = "/v1/chat/completions"
SMALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}


def post(server, body, route=CHAT, **headers):
    return httpx.post(f"{server.url}{route}", content=body, headers={**JSON, **headers}, timeout=60)


def message_of(answer):
    return answer.json()["error"]["message"]


def with_field(name, value: bytes) -> bytes:
    return json.dumps({**SMALL, name: "HERE"}).encode().replace(b'"HERE"', value)


def pairs(n):
    return b"{" + b",".join(b'"k%d":"v"' % i for i in range(n)) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        pairs(MOST_VALUES + 9),
        with_field("metadata", pairs(MOST_VALUES + 9)),
        with_field("tools", b"[" + b"[]," * MOST_VALUES + b"[]]"),
        with_field("tools", b"[" + b"{}," * MOST_VALUES + b"{}]"),
        with_field("stop", b"[" + b'"",' * MOST_VALUES + b'""]'),
        with_field("stop", b"[" + b'"\\"",' * MOST_VALUES + b'""]'),
        b'{"model": "m", "prompt": [' + b"1," * MOST_VALUES + b"1]}",
    ],
    ids=["keys", "nested keys", "lists", "objects", "texts", "escapes", "numbers"],
)
def test_values_by_the_million_are_refused_before_they_are_read(server, body):
    answer = post(server, body)
    assert answer.status_code == 400 and f"at most {MOST_VALUES} values" in message_of(answer)


@pytest.mark.parametrize("text", [',[{"' * 300_000, '\\"' * 300_000, "\\" * 300_000])
def test_what_stands_in_a_text_is_no_value(server, text):
    body = {**SMALL, "user": text}
    assert post(server, json.dumps(body).encode()).status_code == 200


def test_a_packed_body_and_one_in_another_encoding_are_named(server):
    plain = json.dumps(SMALL)
    assert post(server, b"\xef\xbb\xbf" + plain.encode()).status_code == 200
    assert post(server, plain.encode(), **{"content-encoding": "identity"}).status_code == 200
    for body, headers, told in [
        (b"\x1f\x8b", {"content-encoding": "gzip"}, 'Content-Encoding "gzip"'),
        (plain.encode("utf-16"), {}, "must be UTF-8"),
        (plain.replace("hi", "\udc80").encode(errors="surrogatepass"), {}, "must be UTF-8"),
    ]:
        answer = post(server, body, **headers)
        assert answer.status_code == 400 and told in message_of(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_not_declared_as_json_is_told_how(server, kind):
    answer = post(server, json.dumps(SMALL).encode(), **{"content-type": kind})
    assert answer.status_code == 400
    assert '"Content-Type: application/json"' in message_of(answer)


def test_of_a_prompt_far_beyond_the_context_the_beginning_is_enough(folder, context):
    """Megabytes take minutes to encode, and prompts are encoded in turn."""
    target, tokenizer = load_target(folder)
    prompter = Prompter(tokenizer, target.vocab_size, context)
    encoded = []
    whole = prompter.words.hf.encode
    prompter.words._tokenizer.encode = lambda text, **k: (
        encoded.append(len(text)) or whole(text, **k)
    )
    for ask in (
        prompter.text,
        lambda text: prompter.chat(Chat(({"role": "user", "content": text},))),
    ):
        with pytest.raises(PromptTooLong, match=f"maximum context length is {context} tokens"):
            ask("many words " * 100_000)
    assert sum(encoded) < 20 * context
    marks = "<|endoftext|>" * (context - 10)  # long, but of few tokens
    assert len(prompter.text(marks)) == context - 10
