"""`text_offset` of /v1/completions: where each token begins in the text that is returned."""

import json
from types import SimpleNamespace

import httpx
import pytest

from spec_server import Server, Settings
from spec_server.jobs import TokenInfo
from spec_server.logprobs import TextPlaces

ODD = "né 🦊 → ok, 日本 end."
PROMPT = "🦊 é say:odd;"
SCRIPTS = {"odd": ODD}


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0, prefix_bytes=0)) as running:
        yield running


def complete(server, **more):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 60, "temperature": 0,
            "logprobs": 1, **more}  # fmt: skip
    return httpx.post(f"{server.url}/v1/completions", json=body)


def tokens_of(choice):
    found = choice["logprobs"]
    return list(zip(found["tokens"], found["text_offset"], strict=True))


def fits(tokens, text):
    """Whole tokens stand where they are said to, parts of a character where it begins."""
    places = [at for _, at in tokens]
    assert places == sorted(places) and places[0] == 0 and places[-1] < len(text)
    for token, at in tokens:
        assert "\N{REPLACEMENT CHARACTER}" in token or text[at : at + len(token)] == token
    assert any("\N{REPLACEMENT CHARACTER}" in token for token, _ in tokens)


@pytest.mark.parametrize("stop", [None, [", 日"], ["k, x"]])
def test_offsets_point_into_the_text(scripted, stop):
    choice = complete(scripted, stop=stop).json()["choices"][0]
    text = ODD[: ODD.index(", 日")] if stop == [", 日"] else ODD
    assert choice["text"] == text
    fits(tokens_of(choice), text)
    assert tokens_of(choice)[-1][0] in ("." if text == ODD else "ok k")


def test_offsets_of_an_echo_point_into_the_text(server):
    choice = complete(server, echo=True, max_tokens=40).json()["choices"][0]
    assert choice["text"].startswith(PROMPT)
    fits(tokens_of(choice), choice["text"])


@pytest.mark.parametrize("stop", [None, [", 日"]])
def test_a_stream_gives_tokens_with_the_text_they_stand_for(scripted, stop):
    whole = complete(scripted, stop=stop).json()["choices"][0]
    lines = complete(scripted, stop=stop, stream=True).text.splitlines()
    chunks = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    tokens, text = [], ""
    for choice in (c["choices"][0] for c in chunks if c["choices"]):
        text += choice["text"]
        if choice["logprobs"]:
            tokens += tokens_of(choice)
            assert tokens[-1][1] < len(text)
    assert text == whole["text"] and tokens == tokens_of(whole)


def test_an_added_start_token_takes_no_room():
    letters = {1: "<s>", 5: "a", 6: "b"}

    def decode(ids):
        return "".join(letters[i] for i in ids)

    words = SimpleNamespace(decode=decode, decode_all=decode, token_text=letters.get,
                            hf=SimpleNamespace(bos_token_id=1))  # fmt: skip
    assert TextPlaces(words, (1, 5, 6), "ab").echoed() == [0, 0, 1]
    assert TextPlaces(words, (1, 5), "<s>a").echoed() == [0, 3]
    assert TextPlaces(words, (1, 5), "<s>a").next([TokenInfo(6), TokenInfo(5)]) == [4, 5]
