"""Calls that are forced, in each syntax that is known, through the real clients."""

import json

import anthropic
import httpx
import openai
import pytest

from spec_server import Server, Settings
from spec_server.calls import CallSyntax, call_grammar, term

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"enum": [1, 22]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
SHAPE = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"],
         "additionalProperties": False}  # fmt: skip
MISTRAL = (
    "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% if false %}[TOOL_CALLS]{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    '{% if tools %}{{ \'Respond in the format {"name": function name, "parameters": dictionary '
    "of argument name and its value}.' }}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
PYTHONIC = "{% for m in messages %}{{ m.content }}{% endfor %}<|tool_call_start|>{{ tools }}"
MODELS = {
    "qwen": {},
    "mistral": {"marks": ["[TOOL_CALLS]", "[ARGS]"], "template": MISTRAL},
    "old mistral": {"marks": ["[TOOL_CALLS]"], "template": MISTRAL},
    "spelled mistral": {"marks": ["[OTHER]"], "template": MISTRAL},
    "llama": {"marks": ["[OTHER]"], "template": LLAMA},
}


@pytest.fixture(scope="module", params=list(MODELS))
def calling(request, load_other):
    with Server(load_other(**MODELS[request.param]), Settings(port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def qwen(load_other):
    with Server(load_other(), Settings(port=0)) as running:
        yield running


def chat(server, text="Go.", **more):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], tools=TOOLS, max_tokens=200, **more
    )


def satisfied(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        return arguments["city"] in ("Rome", "Paris") and arguments["days"] in (1, 22)
    return call.function.name == "now" and arguments == {}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("max_draft", [0, 4])
def test_a_call_that_is_required_is_made(calling, seed, max_draft):
    answer = chat(
        calling, tool_choice="required", temperature=1.2, seed=seed, parallel_tool_calls=False,
        extra_body={"x_spec": {"max_draft": max_draft}},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert len(choice.message.tool_calls) == 1 and satisfied(choice.message.tool_calls[0])


def test_a_named_tool_is_called(calling):
    for name in ("weather", "now"):
        named = {"type": "function", "function": {"name": name}}
        message = chat(calling, tool_choice=named, temperature=0).choices[0].message
        assert [call.function.name for call in message.tool_calls] == [name]
        assert satisfied(message.tool_calls[0])


def test_a_forced_call_is_the_same_under_speculation_and_streamed(calling):
    named = {"type": "function", "function": {"name": "weather"}}
    plain = chat(calling, tool_choice=named, temperature=0, extra_body={"x_spec": {"max_draft": 0}})
    drafted = chat(calling, tool_choice=named, temperature=0)
    chunks = list(chat(calling, tool_choice=named, temperature=0, stream=True))
    calls = [c for k in chunks for d in k.choices for c in d.delta.tool_calls or ()]
    want = plain.choices[0].message.tool_calls[0].function
    assert drafted.choices[0].message.tool_calls[0].function == want
    assert [(c.function.name, c.function.arguments) for c in calls] == [(want.name, want.arguments)]


def test_several_calls_may_be_required(qwen):
    counts = set()
    for seed in range(8):
        answer = chat(qwen, tool_choice="required", temperature=1.5, seed=seed)
        if answer.choices[0].finish_reason == "tool_calls":
            calls = answer.choices[0].message.tool_calls
            assert all(satisfied(call) for call in calls)
            counts.add(len(calls))
    assert counts


def test_an_answer_beside_tools_has_its_shape_or_is_a_call(qwen):
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": SHAPE}}
    seen = set()
    for seed in range(12):
        answer = chat(qwen, response_format=shape, temperature=20.0, seed=seed)
        message = answer.choices[0].message
        if message.tool_calls:
            assert all(satisfied(call) for call in message.tool_calls)
        elif answer.choices[0].finish_reason == "stop":
            assert json.loads(message.content)["a"] in ("x", "yy")
        seen.add(bool(message.tool_calls))
    assert seen == {True, False}


def test_the_dialect_of_anthropic_forces_calls_as_well(qwen):
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]}
             for t in TOOLS]  # fmt: skip
    with anthropic.Anthropic(base_url=qwen.url, api_key="k", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            answer = client.messages.create(
                model="m", max_tokens=200, tools=tools,
                tool_choice={**choice, "disable_parallel_tool_use": True},
                messages=[{"role": "user", "content": "Go."}],
            )  # fmt: skip
            assert answer.stop_reason == "tool_use"
            (use,) = answer.content
            assert use.type == "tool_use" and use.name in ("weather", "now")
            assert use.name == choice.get("name", use.name)
        for wrong, said in (({"type": "tool", "name": "fly"}, "fly"), ({"type": "tool"}, "name")):
            with pytest.raises(anthropic.BadRequestError, match=said):
                client.messages.create(
                    model="m", max_tokens=9, tools=tools, tool_choice=wrong,
                    messages=[{"role": "user", "content": "Go."}],
                )  # fmt: skip


def test_responses_force_calls_as_well(qwen):
    tools = [{"type": "function", "strict": None, **t["function"]} for t in TOOLS]
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="k", max_retries=0) as client:
        for choice in ("required", {"type": "function", "name": "now"}):
            answer = client.responses.create(
                model="m", input="Go.", tools=tools, tool_choice=choice, max_output_tokens=200,
                store=False, parallel_tool_calls=False,
            )  # fmt: skip
            (item,) = answer.output
            assert item.type == "function_call" and item.name in ("weather", "now")
            assert choice == "required" or item.name == "now"
        body = {"model": "m", "input": "x", "store": False, "tools": tools}
        for wrong in ({"type": "web_search"}, {"type": "function", "name": "fly"}):
            refused = httpx.post(f"{qwen.url}/v1/responses", json={**body, "tool_choice": wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_what_cannot_be_forced_is_refused_by_name(load_other, qwen):
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 9}
    marks = ["<|tool_call_start|>", "<|tool_call_end|>"]
    with Server(load_other(marks=marks, template=PYTHONIC), Settings(port=0)) as server:
        url = f"{server.url}/v1/chat/completions"
        forced = httpx.post(url, json={**body, "tools": TOOLS, "tool_choice": "required"})
        assert forced.status_code == 400 and forced.json()["error"]["param"] == "tool_choice"
        shape = {"type": "json_object"}
        both = httpx.post(url, json={**body, "tools": TOOLS, "response_format": shape})
        assert both.status_code == 400 and both.json()["error"]["param"] == "response_format"
    url = f"{qwen.url}/v1/chat/completions"
    named = {"type": "function", "function": {"name": "fly"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": named, "tools": TOOLS}):
        refused = httpx.post(url, json={**body, **more})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "nonsense"}}}
    refused = httpx.post(url, json={**body, "tools": [odd], "tool_choice": "required"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_marks_are_tokens_where_they_can_be_and_references_are_kept():
    assert term("<a>", [7]) == "<[7]>" and term("<a>", [7, 8]) == '"<a>"'
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": {"y": {}}}
    tool = {"function": {"name": "f", "parameters": schema}}
    grammar = call_grammar(CallSyntax("tagged", ("<[1]>", "<[2]>")), [tool], one=True)
    inner = json.loads(grammar.split("call_0: %json ")[1])
    arguments = inner["properties"]["arguments"]
    assert {**schema, **arguments} == arguments and arguments["$id"] and "one" not in grammar


LINKED = {
    "properties": {
        "v": {"enum": [1, 2]},
        "w": {"$ref": "#/properties/v"},
        "d": {"$ref": "#/$defs/kind"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["v", "w", "d", "next"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["z"]}},
}


def is_linked(value):
    return value is None or (
        value.keys() == {"v", "w", "d", "next"}
        and {value["v"], value["w"]} <= {1, 2}
        and value["d"] == "z"
        and is_linked(value["next"])
    )


def forced(server, parameters, **more):
    body = {
        "model": "m", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 600,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, **more,
    }  # fmt: skip
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("kind", "draft"), [("object", "draft-04/schema#"), (["object", "null"], "2020-12/schema")]
)
def test_references_mean_the_arguments_themselves(calling, kind, draft):
    schema = {"$schema": f"http://json-schema.org/{draft}", **LINKED, "type": kind}
    n_whole = 0
    for seed in range(3):
        answer = forced(calling, schema, temperature=1.0, seed=seed).json()
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert is_linked(arguments) and arguments is not None
        n_whole += 1
    assert n_whole


@pytest.mark.parametrize("schema", [{"type": "string"}, {"enum": [1, 2]}, {"type": "array"}])
def test_arguments_that_can_be_no_object_are_refused(calling, schema):
    answer = forced(calling, schema)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
