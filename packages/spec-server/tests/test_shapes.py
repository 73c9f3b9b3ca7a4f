"""What the official clients' own models demand of an answer: each field they need, of its type."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from spec_core import Sampling
from spec_server import Server, Settings
from spec_server.dialects.chat import ChatAnswer
from spec_server.dialects.completions import CompletionAnswer
from spec_server.jobs import Ask, End, Figures, Piece
from spec_server.schema.base import Wish
from spec_server.schema.responses import ResponsesBody, responses_wish

SCRIPTS = {
    "plain": "Hello there, friend.",
    "think": "<think>\nLet me see.\n</think>\n\nThe answer is 4.",
    "call": 'Look.<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
    "lines": "one\x85two\u2028three\u2029four",
}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = {"type": "function", "strict": False, **FUNCTION}


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0, prefix_bytes=0)) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(scripted):
    url = f"{scripted.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", _strict_response_validation=True)


@pytest.fixture(scope="module")
def anthropic_client(scripted):
    return anthropic.Anthropic(
        base_url=scripted.url, api_key="none", _strict_response_validation=True
    )


def said(key):
    return [{"role": "user", "content": f"say:{key};"}]


@pytest.mark.parametrize("key", ["plain", "think", "call"])
def test_answers_of_the_openai_dialect(openai_client, key):
    asked = {"model": "m", "messages": said(key), "tools": TOOLS, "temperature": 0}
    chats = openai_client.chat.completions
    whole = chats.create(**asked, logprobs=True, top_logprobs=2)
    *chunks, last = chats.create(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.usage.completion_tokens == last.usage.completion_tokens and not last.choices
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks)
    with chats.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    answers = openai_client.responses
    asked = {"model": "m", "input": said(key), "tools": [FLAT], "temperature": 0, "store": False}
    whole = answers.create(**asked, top_logprobs=2)
    with answers.stream(**asked) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in whole.output]


@pytest.mark.parametrize("key", ["plain", "think", "call"])
def test_answers_of_the_anthropic_dialect(anthropic_client, key):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {"model": "m", "messages": said(key), "tools": tools, "max_tokens": 99}
    whole = anthropic_client.messages.create(**asked)
    with anthropic_client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == [b.type for b in whole.content]


def test_models_in_both_dialects(openai_client, anthropic_client):
    assert openai_client.models.list().data[0].id == "script"
    assert anthropic_client.models.list().data[0].lifecycle == "active"


def test_a_response_repeats_what_was_asked(openai_client):
    shape = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    answer = openai_client.responses.create(
        model="m", input="say:plain;", instructions="Be brief.", tools=[FLAT], store=False,
        tool_choice="none", text={"format": shape}, reasoning={"effort": "none"},
        metadata={"a": "b"}, max_output_tokens=3, temperature=0,
    )  # fmt: skip
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}
    assert answer.tools[0].name == "f" and answer.tool_choice == "none"
    assert answer.text.format.type == "json_schema" and answer.reasoning.effort == "none"


@pytest.mark.parametrize(("key", "n"), [("plain", 0), ("think", 9)])
def test_tokens_of_the_reasoning_are_counted(scripted, openai_client, key, n):
    tokenizer = scripted.engine.served.pair.tokenizer
    if n:
        n = len(tokenizer.wrapper._tokenizer.encode(SCRIPTS[key].partition("\n\n")[0]))
    asked = {"model": "m", "temperature": 0}
    chat = openai_client.chat.completions.create(messages=said(key), **asked)
    assert chat.usage.completion_tokens_details.reasoning_tokens == n
    told = openai_client.responses.create(input=said(key), store=False, **asked).usage
    assert told.output_tokens_details.reasoning_tokens == n


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_event_is_one_line_for_every_reader_of_lines(scripted, route):
    """str.splitlines, and httpx with it, also ends lines at these."""
    body = {"model": "m", "stream": True, "temperature": 0, "input": said("lines")}
    if route != "/v1/responses":
        body["messages"] = body.pop("input")
        body["max_tokens"] = 99
    text = ""
    for line in httpx.post(f"{scripted.url}{route}", json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
        text += "".join(c["delta"].get("content", "") for c in event.get("choices", ()))
    assert text == SCRIPTS["lines"]


async def _two_answers_with_a_pause(*_):
    figures = Figures(1, 0, 1, "baseline", 1.0, 0, 0, 1.0, 0.1)
    yield 0, Piece("a", ())
    yield 0, End("stop", None, figures)
    yield None
    yield 1, End("stop", None, figures)


class _Reply:
    n_reasoning, made_call = 0, False

    def __init__(self):
        self.end, self.logprobs = None, []

    def take(self, event):
        self.end = event if isinstance(event, End) else None
        return []


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_a_sign_of_life_is_of_a_choice_that_has_not_ended(dialect):
    exchange: Any = SimpleNamespace(
        id="x", created=1, asks=[Ask((1,), 4)] * 2, events=_two_answers_with_a_pause
    )
    words: Any = SimpleNamespace(decode=lambda ids: "")
    wish = Wish(Sampling(), n=2)
    if dialect == "chat":
        answer = ChatAnswer(exchange, [_Reply(), _Reply()], wish, "m", words, True)
    else:
        answer = CompletionAnswer(exchange, wish, "m", words, True)

    async def read():
        return [data async for data in answer.stream(1.0)]

    *events, done = [data.decode()[6:] for data in asyncio.run(read())]
    assert done.strip() == "[DONE]"
    ended = set()
    for event in map(json.loads, events):
        for choice in event["choices"]:
            assert choice["index"] not in ended
            ended |= {choice["index"]} if choice["finish_reason"] else set()
    assert ended == {0, 1}


def test_cached_tokens_are_summed_over_prompts(load_tiny):
    prompts = [[20 + i for i in range(30)], [60 + i for i in range(30)]]
    with Server(load_tiny(), Settings(port=0)) as running:
        body = {"model": "m", "prompt": prompts, "max_tokens": 1}
        for cached in (0, 58):
            usage = httpx.post(f"{running.url}/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == 60
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_what_was_refused_and_reasoned_before_reaches_the_prompt(scripted):
    no = {"role": "assistant", "content": None, "refusal": "I will not."}
    messages = [*said("plain"), no, *said("plain")]
    asked = {"model": "m", "messages": messages, "max_tokens": 1}
    counts = []
    for refusal in ("I will not.", "I will not, and here is at some length why."):
        no["refusal"] = refusal
        answer = httpx.post(f"{scripted.url}/v1/chat/completions", json=asked).json()
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts[1] > counts[0]
    parts = (
        [{"type": "reasoning_text", "text": "One. "}],
        [{"type": "reasoning_text", "text": "Two."}],
    )
    items = [{"type": "reasoning", "content": content} for content in parts]
    body = {"model": "m", "input": [*items, {"role": "assistant", "content": "x"}]}
    wish = responses_wish(ResponsesBody.model_validate(body), knows_effort=False)
    assert wish.chat.messages[-1]["reasoning_content"] == "One. Two."
