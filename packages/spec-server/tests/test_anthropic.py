"""The official client, and request shapes of agent clients, against a real socket."""

import json

import anthropic
import httpx
import pytest

from spec_server import Server, Settings
from spec_server.prompts import Chat, Prompter

SCRIPTS = {
    "plain": "Hello there, friend.",
    "think": "<think>\nLet me see.\n</think>\n\nThe answer is 4.",
    "call": 'Let me look.\n<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>',
    "both": '<think>hm</think><tool_call>{"name": "Bash", "arguments": {}}</tool_call>',
    "empty": "",
}
BASH = {
    "name": "Bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0, prefix_bytes=0)) as running:
        yield running


def client_of(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def client(scripted):
    with client_of(scripted) as one:
        yield one


def said(key):
    return [{"role": "user", "content": f"say:{key};"}]


def summary(message):
    blocks = []
    for block in message.content:
        kind = block.type
        if kind == "text":
            blocks.append((kind, block.text))
        elif kind == "thinking":
            blocks.append((kind, block.thinking))
        else:
            blocks.append((kind, block.name, block.input))
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens


@pytest.mark.parametrize("key", sorted(SCRIPTS))
@pytest.mark.parametrize("max_tokens", [1, 3, 200])
def test_a_stream_says_what_the_whole_message_says(client, key, max_tokens):
    settings = {"model": "claude", "max_tokens": max_tokens, "messages": said(key),
                "extra_body": {"temperature": 0}, "tools": [BASH]}  # fmt: skip
    whole = client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        streamed = stream.get_final_message()
    assert summary(streamed) == summary(whole)
    assert whole.model == "script" and whole.id.startswith("msg_")


def test_blocks_open_close_and_number_in_order(scripted):
    body = {"model": "m", "max_tokens": 200, "messages": said("both"), "tools": [BASH],
            "temperature": 0, "stream": True}  # fmt: skip
    text = httpx.post(f"{scripted.url}/v1/messages", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = [e["type"] for e in events if e["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    opened: list[int] = []
    now = None
    for event in events:
        if event["type"] == "content_block_start":
            assert now is None and event["index"] == len(opened)
            now = event["index"]
            opened.append(now)
        elif event["type"] == "content_block_delta":
            assert event["index"] == now
        elif event["type"] == "content_block_stop":
            assert event["index"] == now
            now = None
    assert opened == [0, 1] and now is None
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [e["type"] for e in events]


def test_stop_reasons_are_right(client):
    def reason(key, max_tokens=200, **settings):
        return client.messages.create(
            model="m",
            max_tokens=max_tokens,
            messages=said(key),
            extra_body={"temperature": 0},
            **settings,
        )

    assert reason("plain").stop_reason == "end_turn"
    assert reason("think", max_tokens=3).stop_reason == "max_tokens"
    assert reason("call", tools=[BASH]).stop_reason == "tool_use"
    stopped = reason("plain", stop_sequences=["zz", "friend"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "friend")
    assert stopped.content[0].text == "Hello there, "
    assert reason("empty").content == []


def test_the_round_trip_of_a_tool(client):
    first = client.messages.create(
        model="m",
        max_tokens=200,
        messages=said("call"),
        tools=[BASH],
        extra_body={"temperature": 0},
    )
    use = first.content[-1]
    assert (use.type, use.name, use.input) == ("tool_use", "Bash", {"command": "ls"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "a.txt"}
    last = client.messages.create(
        model="m", max_tokens=200, tools=[BASH], extra_body={"temperature": 0},
        messages=[
            *said("call"),
            {"role": "assistant", "content": [b.model_dump() for b in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "say:plain;"}]},
        ],
    )  # fmt: skip
    assert last.content[0].text == SCRIPTS["plain"]


def test_an_answer_can_be_begun(client):
    answer = client.messages.create(
        model="m", max_tokens=50, extra_body={"temperature": 0},
        messages=[*said("plain"), {"role": "assistant", "content": "Well, "}],
    )  # fmt: skip
    assert answer.content[0].text == SCRIPTS["plain"]


@pytest.mark.parametrize("content", ["", " \n", [{"type": "text", "text": ""}]])
def test_an_answer_that_has_not_begun_is_asked_for_as_without_it(client, content):
    counted = [
        client.messages.count_tokens(model="m", messages=messages).input_tokens
        for messages in (said("plain"), [*said("plain"), {"role": "assistant", "content": content}])
    ]
    assert counted[0] == counted[1]


def test_white_space_at_the_end_of_the_beginning_stays(scripted):
    prompter = Prompter(scripted.engine.served.pair.tokenizer, 500)
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": " a:\n "})
    prompt = prompter.chat(Chat(messages, continue_last=True))
    assert prompter.decode(prompt.ids).endswith("<|im_start|>assistant\n a:\n ")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_to_be_omitted_has_a_block_without_text(client, stream):
    asked = {"model": "m", "max_tokens": 99, "messages": said("think")}
    thinking = {"type": "adaptive", "display": "omitted"}
    if stream:
        with client.messages.stream(**asked, thinking=thinking) as events:
            assert "thinking" not in [event.type for event in events]
            content = events.get_final_message().content
    else:
        content = client.messages.create(**asked, thinking=thinking).content
    assert [b.type for b in content] == ["thinking", "text"]
    assert content[0].thinking == "" and content[1].text == "The answer is 4."


def test_tokens_are_counted_as_they_are_used(client):
    tools = [BASH]
    for messages in (said("plain"), [*said("plain"), {"role": "assistant", "content": "x"}]):
        counted = client.messages.count_tokens(model="m", messages=messages, tools=tools)
        used = client.messages.create(model="m", max_tokens=1, messages=messages, tools=tools).usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    longer = client.messages.count_tokens(model="m", messages=said("plain"), system="word " * 50)
    shorter = client.messages.count_tokens(model="m", messages=said("plain"))
    assert longer.input_tokens > shorter.input_tokens + 50


@pytest.mark.parametrize(
    ("arguments", "status"),
    [({}, 200), ("", 200), (None, 200), ({"a": 1}, 200), ("{", 400), ([1], 400)],
)
def test_input_of_earlier_calls_never_breaks_the_server(server, arguments, status):
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "m", "max_tokens": 2, "messages": messages}
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "messages.1.tool_use.input" in answer.json()["error"]["message"]


def test_errors_have_the_dialects_shape(client, scripted):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="m", max_tokens=5, messages=[])
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "messages" in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* tokens > 4095"):
        client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "word " * 5000}]
        )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": [image]}]
        )
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(
            model="m", max_tokens=5, messages=said("plain"), tools=[BASH],
            tool_choice={"type": "tool", "name": "fly"},
        )  # fmt: skip
    empty = httpx.post(f"{scripted.url}/v1/messages/count_tokens", json={})
    assert empty.status_code == 400 and empty.json()["type"] == "error"


def test_the_model_list_is_the_dialects(client):
    (model,) = client.models.list()
    assert (model.id, model.type) == ("script", "model")


def test_usage_tells_what_was_read_from_the_cache(server):
    with client_of(server) as client:
        messages = [{"role": "user", "content": "Tell me about the brown fox, at length please."}]
        first = client.messages.create(model="m", max_tokens=8, messages=messages).usage
        again = client.messages.create(model="m", max_tokens=8, messages=messages).usage
        assert again.cache_read_input_tokens > 10
        total = first.input_tokens + first.cache_read_input_tokens
        assert again.input_tokens + again.cache_read_input_tokens == total
