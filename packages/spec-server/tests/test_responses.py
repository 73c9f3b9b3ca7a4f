"""The Responses dialect with the official client, and the request shape of a coding agent."""

import httpx
import openai
import pytest

from spec_server import Server, Settings

SCRIPTS = {
    "plain": "Hello there, friend.",
    "think": "<think>\nLet me see.\n</think>\n\nThe answer is 4.",
    "call": "Let me look.\n"
    '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>',
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Run a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def scripted(load_script):
    with Server(load_script(SCRIPTS), Settings(port=0)) as running:
        yield running


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def summary(response):
    items = []
    for item in response.output:
        if item.type == "message":
            items.append((item.type, item.content[0].text))
        elif item.type == "reasoning":
            items.append((item.type, item.content[0].text))
        else:
            items.append((item.type, item.name, item.arguments))
    return items, response.status, response.usage.output_tokens


@pytest.mark.parametrize("key", sorted(SCRIPTS))
@pytest.mark.parametrize("limit", [2, 200])
def test_a_stream_says_what_the_whole_response_says(client, key, limit):
    settings = {"model": "m", "input": f"say:{key};", "temperature": 0, "tools": [SHELL],
                "max_output_tokens": limit}  # fmt: skip
    whole = client.responses.create(**settings)
    numbers, last, deltas = [], None, ""
    for event in client.responses.create(stream=True, **settings):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            deltas += event.delta
        last = event
    assert numbers == list(range(len(numbers)))
    assert last.type == f"response.{whole.status}"
    assert summary(last.response) == summary(whole)
    assert deltas == whole.output_text
    if limit == 2:
        assert whole.status == "incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"


def test_the_round_trip_of_a_call(client):
    first = client.responses.create(model="m", input="say:call;", tools=[SHELL], temperature=0)
    assert first.output_text == "Let me look."
    call = first.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "shell", '{"command": "ls"}')
    conversation = [
        {"role": "user", "content": "say:call;"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"},
        {"role": "user", "content": [{"type": "input_text", "text": "say:plain;"}]},
    ]
    last = client.responses.create(model="m", input=conversation, tools=[SHELL], temperature=0)
    assert last.output_text == SCRIPTS["plain"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("{}", 200), ("", 200), (None, 200), ({"a": 1}, 200), ("null", 200), ("{", 400), ([1], 400)],
)
def test_arguments_of_earlier_calls_never_break_the_server(server, arguments, status):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    body = {"model": "m", "max_output_tokens": 2, "input": items}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "input[1].arguments" in answer.json()["error"]["message"]


def test_structured_output(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.responses.create(
            model="m", input="hi", max_output_tokens=5, temperature=0,
            text={"format": {"type": "json_schema", "name": "x", "schema": {
                "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                "additionalProperties": False}}},
        )  # fmt: skip
        assert answer.output_text.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"), ("store", True), ("background", True),
        ("conversation", "c"), ("truncation", "auto"), ("tool_choice", "required"),
        ("max_tool_calls", 3), ("prompt", {"id": "x"}),
    ],
)  # fmt: skip
def test_what_needs_a_memory_is_refused_by_name(scripted, field, value):
    body = {"model": "m", "input": "hi", field: value}
    answer = httpx.post(f"{scripted.url}/v1/responses", json=body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]
