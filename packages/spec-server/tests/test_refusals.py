"""Bodies and headers that no sane client sends are refused in words, never by a fault of ours."""

import json
import re
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
from pydantic import ValidationError

from spec_server import Server, Settings
from spec_server.prompts import Prompter
from spec_server.schema.anthropic import MessagesBody
from spec_server.schema.base import MOST_ITEMS
from spec_server.schema.openai import ChatBody, CompletionBody
from spec_server.schema.responses import ResponsesBody
from spec_server.tools import call_parser

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HALF = '"\\ud800x"'  # half of a surrogate pair: JSON, but no Unicode text
TALK = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "HALF"}}
TOOL = {"type": "function", "function": {"name": "a", "description": "HALF"}}
HALVES = [
    (CHAT, {"messages": [{"role": "user", "content": "HALF"}]}),
    (CHAT, {"messages": TALK, "stop": ["HALF"]}),
    (CHAT, {"messages": TALK, "tools": [TOOL]}),
    (CHAT, {"messages": TALK, "tools": [TOOL], "tool_choice": NAMED}),
    (COMPLETIONS, {"prompt": "HALF"}),
    (RESPONSES, {"input": "x", "metadata": {"a": "HALF"}}),
    (RESPONSES, {"input": "x", "tools": [{"type": "HALF"}]}),
    (MESSAGES, {"messages": TALK, "max_tokens": 2, "tools": [
        {"name": "a", "input_schema": {"type": "object", "description": "HALF"}}]}),
]  # fmt: skip


def raw(server, route, body):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{route}", content=body, headers=headers, timeout=30)


def chat(server, **fields):
    body = {"model": "m", "messages": TALK, "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}{CHAT}", json=body, timeout=30)


def message_of(answer):
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(("route", "body"), HALVES)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(server, route, body):
    text = json.dumps({"model": "m", **body}).replace('"HALF"', HALF)
    answer = raw(server, route, text)
    assert answer.status_code == 400 and "must be Unicode" in message_of(answer)
    whole = raw(server, route, text.replace("\\ud800", "\\ud83d\\ude00"))
    assert "Unicode" not in whole.text and whole.status_code < 500


def test_half_a_surrogate_pair_in_a_key_or_in_arguments(server):
    twice = raw(server, CHAT, f"{{{HALF}: 1, {HALF}: 2}}")
    assert twice.status_code == 400 and "must occur once" in message_of(twice)
    call = {"function": {"name": "a", "arguments": f'{{"x": {HALF}}}'}}
    turn = {"role": "assistant", "tool_calls": [call]}
    answer = chat(server, messages=[*TALK, turn, {"role": "tool", "content": "1"}])
    assert answer.status_code == 400 and "arguments" in message_of(answer)


def test_what_is_missing_is_named_alone(server):
    for body, named in (
        ('{"messages": []}', "model"),
        ('{"model": "m"}', "messages"),
        ("", "body"),
    ):
        answer = raw(server, CHAT, body)
        assert answer.status_code == 400
        assert re.fullmatch(rf'".*{named}" must be given, and is missing\.', message_of(answer))


def test_a_call_that_no_answer_can_hold_stays_text():
    tools = [{"type": "function", "function": {"name": "a"}}]
    parse = call_parser(lambda body, tools: json.loads(body), tools)
    assert parse(f'{{"name": "a", "arguments": {{"x": {HALF}}}}}') is None
    assert parse(f'{{"name": {HALF}, "arguments": {{}}}}') is None
    assert parse('{"name": "a", "arguments": {"x": "\\ud83d\\ude00"}}') is not None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(server, number):
    body = f'{{"model": "m", "input": "x", "tools": [{{"type": "t", "x": {number}}}]}}'
    answer = raw(server, RESPONSES, body)
    assert answer.status_code == 400 and f"got {number}" in message_of(answer)


@pytest.mark.parametrize("key", ["9" * 5000, "07", "\u0663", "-1", "1.0"])
def test_keys_of_a_bias_are_plain_ids(server, key):
    answer = chat(server, logit_bias={"7": 1, key: 2})
    assert answer.status_code == 400 and '"logit_bias"' in message_of(answer)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
         "json_schema"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"x_spec": {"by_token": True}}, "by_token"),
    ],
)  # fmt: skip
def test_fields_of_a_chat_that_contradict_each_other(server, fields, named):
    answer = chat(server, **fields)
    assert answer.status_code == 400 and named in message_of(answer)


def test_fields_of_a_chat_that_say_the_same_twice(server):
    same = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert chat(server, **same, reasoning_effort="none").status_code == 200


FUNCTION = {"type": "function", "name": "a"}


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        (COMPLETIONS, {"prompt": "x", "x_spec": {"by_token": True}}, "by_token"),
        (RESPONSES, {"input": "x", "x_spec": {"by_token": True}}, "by_token"),
        (MESSAGES, {"messages": TALK, "max_tokens": 2, "x_spec": {"by_token": True}}, "by_token"),
        (MESSAGES, {"messages": TALK, "max_tokens": 2, "tools": [
            {"name": "a", "input_schema": {}}], "tool_choice": {"type": "auto", "name": "a"}},
         "tool_choice.name"),
        (RESPONSES, {"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "function"}},
         "tool_choice"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_object", "schema": {}}}},
         "text.format.schema"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused_by_name(server, route, body, named):
    answer = raw(server, route, json.dumps({"model": "m", **body}))
    assert answer.status_code == 400 and named in message_of(answer)


@pytest.mark.parametrize("header", ["Host: [", "Host: localhost\r\nOrigin: http://["])
def test_addresses_that_are_none(server, header):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(f"GET /v1/models HTTP/1.1\r\n{header}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 403 ")


def test_any_host_lets_no_page_without_an_origin_in(load_tiny):
    with Server(load_tiny(), Settings(port=0, allowed_hosts=("*",))) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(b"GET /v1/models HTTP/1.1\r\nHost:\r\nOrigin: null\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_grammar_that_tokens_cannot_follow_is_told_in_one_line(server):
    schema = {"type": "string", "pattern": "^<tool_call>$"}
    answer = chat(server, response_format=shaped(schema), max_tokens=60)
    assert answer.status_code == 400
    assert message_of(answer).startswith("[grammar] ") and "\n" not in message_of(answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "array", "items": {"$ref": "#/items"}, "minItems": 1, "maxItems": 1},
    ],
)
@pytest.mark.parametrize("max_draft", [0, 4])
def test_a_shape_that_nothing_has_is_no_short_answer(server, schema, max_draft):
    """The grammar ends where it leads nowhere: the answer would stop there, as if it were whole."""
    limits = {"max_tokens": 60, "x_spec": {"max_draft": max_draft}}
    answer = chat(server, response_format=shaped(schema), **limits)
    assert answer.status_code == 400 and message_of(answer).startswith("[grammar] ")


def shaped(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def tool_of(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", ["<|im_end|>", "a</tool_call>b"])
def test_a_tool_named_like_a_special_token_is_named_with_the_reason(server, name, choice):
    answer = chat(server, tools=[tool_of("b"), tool_of(name)], tool_choice=choice)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert f'the tool "{name}"' in message_of(answer) and "special tokens" in message_of(answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a<|im_end|>"},
        {"type": "array", "items": {"enum": [1, "<tool_call>"]}},
        {"anyOf": [{"type": "object", "properties": {"<|im_start|>": {}}}]},
    ],
)
def test_a_shape_that_spells_a_special_token_is_refused(server, schema):
    answer = chat(server, response_format=shaped(schema))
    assert answer.status_code == 400 and "special tokens" in message_of(answer)
    forced = chat(server, tools=[tool_of("b", x=schema)], tool_choice="required")
    assert forced.status_code == 400 and 'the tool "b"' in message_of(forced)
    assert chat(server, tools=[tool_of("b", x=schema)]).status_code == 200


def test_many_texts_are_looked_through_at_once_for_many_added_tokens():
    prompter = Prompter.__new__(Prompter)
    added = {f"<unused{i}>": i for i in range(6000)}
    prompter.words = SimpleNamespace(hf=SimpleNamespace(get_added_vocab=lambda: added))
    start = time.process_time()
    for i in range(20_000):
        prompter._check_text(f"property_{i}", "a schema", "tools")
    assert time.process_time() - start < 1.5  # one by one: 4 s


def test_two_tools_of_one_name_are_refused_by_it(server):
    answer = chat(server, tools=[tool_of("b"), tool_of("twin"), tool_of("twin")])
    assert answer.status_code == 400 and '"twin"' in message_of(answer)
    tools = [{"name": "twin", "input_schema": {}}] * 2
    body = {"model": "m", "messages": TALK, "max_tokens": 2, "tools": tools}
    answer = httpx.post(f"{server.url}{MESSAGES}", json=body)
    assert answer.status_code == 400 and '"twin"' in message_of(answer)


MANY = MOST_ITEMS


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatBody, {"messages": TALK, **{f"x{i}": 1 for i in range(MANY)}}),
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatBody, {"messages": TALK, "metadata": {str(i): 1 for i in range(MANY)}}),
        (CompletionBody, {"prompt": [[1.5]] * MANY}),
        (ResponsesBody, {"input": [{"type": "x"}] * MANY}),
        (MessagesBody, {"messages": [{"role": "user", "content": [{}] * MANY}], "max_tokens": 1}),
    ],
)
def test_of_many_wrong_items_the_first_is_enough(model, fields):
    with pytest.raises(ValidationError) as wrong:
        model.model_validate({"model": "m", **fields})
    assert wrong.value.error_count() < 20


def test_more_messages_than_any_context_holds_are_refused_by_number(server):
    answer = chat(server, messages=TALK * (MOST_ITEMS + 1))
    assert answer.status_code == 400 and str(MOST_ITEMS) in message_of(answer)
    assert CompletionBody.model_validate({"model": "m", "prompt": [5] * (MOST_ITEMS + 1)})


@pytest.mark.parametrize("value", ["x", True, None, [1], 101])
def test_biases_are_numbers(server, value):
    answer = chat(server, logit_bias={"5": 1, "7": value})
    assert answer.status_code == 400 and '"logit_bias"' in message_of(answer)


def test_two_tools_of_one_name_are_refused_with_the_remedy(server):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool, tool]}
    answer = raw(server, CHAT, json.dumps(body))
    assert answer.status_code == 400
    assert 'got "look" twice. Give each its own.' in message_of(answer)
