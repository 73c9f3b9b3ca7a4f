"""Answers in gpt-oss's channels: no mark and no reasoning in the text, calls as calls."""

import json

import httpx
import pytest

from spec_server import Server, Settings
from spec_server.harmony import Harmony, TextStops, parse_call
from spec_server.tools import call_parser
from spec_targets import load_target

from .conftest import make_model

MARKS = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
]  # fmt: skip
TEMPLATE = (  # what OpenAI's does, in short
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort|default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% set last = namespace(name='') %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>"
    "commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANSWER = (
    "<|channel|>analysis<|message|>Let me see.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 4, not <5>.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
SCRIPTS = {
    "answer": ANSWER,
    "call": CALL,
    "role": " to=functions.get_weather<|channel|>commentary json<|message|>"
    '{"city": "Rome"}<|call|>',
    "analysis": "<|channel|>analysis<|message|>We need it.<|end|><|start|>assistant"
    '<|channel|>analysis to=functions.get_weather code<|message|>\n{"city": "Bonn"}<|call|>',
    "twice": "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Three.",
    "two texts": "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Two.",
    "broken": "<|channel|>commentary to=functions.get_weather<|message|>{nope<|call|>",
    "cut": "<|channel|>analysis<|message|>Let me<|end|><|start|>assistant<|channel|>fin",
    "plain": "Just so.",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WANT = {  # reasoning, text, calls
    "answer": ("Let me see.", "It is 4, not <5>.", []),
    "call": ("I need the weather.", "One moment.", [{"city": "Paris"}]),
    "role": ("", "", [{"city": "Rome"}]),
    "analysis": ("We need it.", "", [{"city": "Bonn"}]),
    "twice": ("One.\n\nTwo.", "Three.", []),
    "two texts": ("", "One.\n\nTwo.", []),
    "broken": ("", "{nope", []),
    "cut": ("Let me", "", []),
    "plain": ("", "Just so.", []),
}


@pytest.mark.parametrize("chunk", [1, 3, 10**6])
@pytest.mark.parametrize("key", SCRIPTS)
def test_channels_are_told_apart_however_they_come(key, chunk):
    splitter, text = Harmony(call_parser(parse_call, [TOOL])), SCRIPTS[key]
    parts = [p for at in range(0, len(text), chunk) for p in splitter.push(text[at : at + chunk])]
    parts += splitter.finish()
    said = {k: "".join(p.text for p in parts if p.kind == k) for k in ("reasoning", "text")}
    calls = [json.loads(p.call.arguments) for p in parts if p.call is not None]
    assert (said["reasoning"], said["text"], calls) == WANT[key]
    for part in parts:
        assert part.kind != "text" or part.text == "\n\n" or text[part.at :].startswith(part.text)


@pytest.fixture(scope="module")
def server(load_script, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("oss"), marks=MARKS, template=TEMPLATE)
    settings = folder / "tokenizer_config.json"
    named = [*MARKS, "<|im_start|>", "<|endoftext|>"]
    config = json.loads(settings.read_text()) | {"additional_special_tokens": named}
    settings.write_text(json.dumps(config))
    with Server(load_script(SCRIPTS, folder), Settings(port=0)) as running:
        yield running


def chat(server, *messages, **more):
    body = {"model": "m", "temperature": 0, "messages": list(messages), **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "key", ["answer", "call", "role", "analysis", "twice", "two texts", "plain"]
)
@pytest.mark.parametrize("tools", [[TOOL], None])
def test_no_channel_leaks_into_the_text_and_calls_are_calls(server, key, tools):
    """ml-explore/mlx-lm#875: marks and reasoning stood in the text."""
    reasoning, text, calls = WANT[key]
    answer = chat(server, {"role": "user", "content": f"say:{key};"}, tools=tools)["choices"][0]
    message = answer["message"]
    assert (message.get("reasoning_content") or "") == reasoning
    if tools is None and calls:  # none were offered
        assert message["content"].endswith(json.dumps(calls[0])) and "tool_calls" not in message
        return
    assert (message["content"] or "") == text
    called = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    assert called == calls
    assert answer["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_stream_and_the_dialect_of_anthropic_say_the_same(server):
    body = {"model": "m", "max_tokens": 99, "tools": [], "messages": []}
    body["messages"] = [{"role": "user", "content": "say:call;"}]
    parameters = TOOL["function"]["parameters"]
    body["tools"] = [{"name": "get_weather", "input_schema": parameters}]
    blocks = httpx.post(f"{server.url}/v1/messages", json=body).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[1]["text"] == "One moment." and blocks[2]["input"] == {"city": "Paris"}
    body = {**body, "tools": [TOOL], "stream": True}
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    said = ["".join(d.get(n) or "" for d in deltas) for n in ("reasoning_content", "content")]
    assert said == ["I need the weather.", "One moment."]
    (call,) = [c for d in deltas for c in d.get("tool_calls", ())]
    assert call["function"]["name"] == "get_weather"


def test_earlier_calls_and_their_results_go_through_the_template(server):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    for more in ({}, {"content": "One moment."}, {"content": "x", "reasoning_content": "y"}):
        answer = chat(
            server,
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "tool_calls": [call], **more},
            {"role": "tool", "tool_call_id": "c", "content": "say:answer;"},
            tools=[TOOL],
        )
        assert answer["choices"][0]["message"]["content"] == WANT["answer"][1]


def test_reasoning_can_be_left_out_and_logprobs_are_the_texts(server):
    body = {"role": "user", "content": "say:plain;"}
    off = chat(server, body, reasoning_effort="none")
    assert off["usage"]["prompt_tokens"] > chat(server, body)["usage"]["prompt_tokens"]
    assert off["choices"][0]["message"]["content"] == "Just so."
    for key in ("answer", "two texts"):
        asked = {"role": "user", "content": f"say:{key};"}
        told = chat(server, asked, logprobs=True)["choices"][0]
        spelled = "".join(entry["token"] for entry in told["logprobs"]["content"])
        assert spelled == WANT[key][1].replace("\n", "")  # the gap is of no token


def test_a_call_ends_the_answer_whatever_the_configs_list(tmp_path):
    folder = make_model(tmp_path, marks=MARKS, template=TEMPLATE)
    _, tokenizer = load_target(folder)
    vocab = tokenizer.wrapper._tokenizer.get_vocab()
    assert {vocab["<|call|>"], vocab["<|return|>"]} <= tokenizer.stop_ids


def test_the_place_where_the_reasoning_ends_is_known():
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    splitter = Harmony()
    splitter.push(said)
    splitter.finish()
    assert said[: splitter.n_reasoned].endswith("<|message|>hm")


STOPS = {  # script, stop strings: what is left of the text
    ("answer", "final"): "It is 4, not <5>.",
    ("answer", "n"): "It is 4, ",
    ("answer", "<"): "It is 4, not ",
    ("answer", "|"): "It is 4, not <5>.",
    ("answer", "see"): "It is 4, not <5>.",
    ("answer", "<|end|>"): "It is 4, not <5>.",
    ("answer", "<5>.<"): "It is 4, not <5>.",
    ("call", "assistant"): "One moment.",
    ("call", "city"): "One moment.",
    ("call", "mo"): "One ",
    ("call", "nt.x"): "One moment.",
    ("two texts", "commentary"): "One.\n\nTwo.",
    ("two texts", "e.T"): "One.\n\nTwo.",
    ("two texts", "Tw"): "One.",
    ("plain", "st s"): "Ju",
    ("plain", "o."): "Just s",
}


@pytest.mark.parametrize("chunk", [1, 3, 10**6])
@pytest.mark.parametrize(("key", "stop"), STOPS)
def test_a_stop_string_is_looked_for_in_what_the_user_reads(key, stop, chunk):
    stops, text, said = TextStops([stop]), SCRIPTS[key], []
    for at in range(0, len(text), chunk):
        said.append(stops.push(text[at : at + chunk]))
        if stops.found is not None:
            break
    else:
        said.append(stops.finish())
    cut = "".join(said)
    assert text.startswith(cut) and (cut == text) == (stops.found is None)
    splitter = Harmony(call_parser(parse_call, [TOOL]))
    parts = splitter.push(cut) + splitter.finish()
    assert "".join(p.text for p in parts if p.kind == "text") == STOPS[key, stop]


def test_what_is_no_stop_string_is_handed_on_at_once():
    stops = TextStops(["nal"])
    assert stops.push("<|channel|>analysis<|message|>fi") == "<|channel|>analysis<|message|>fi"
    said = stops.push("n<|end|><|start|>assistant<|channel|>final<|message|>fin")
    assert said == "n<|end|><|start|>assistant<|channel|>final<|message|>fi"
    more = "<|end|><|channel|>analysis<|message|>a"
    assert stops.push(more) == f"n{more}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("key", "stop"), STOPS)
def test_an_answer_in_channels_ends_at_a_stop_string_of_its_text(server, key, stop, stream):
    body = {"model": "m", "temperature": 0, "stop": [stop], "stream": stream, "tools": [TOOL]}
    body["messages"] = [{"role": "user", "content": f"say:{key};"}]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    if stream:
        lines = [x[6:] for x in answer.text.splitlines() if x.startswith("data: {")]
        choices = [c for x in lines for c in json.loads(x)["choices"]]
        text = "".join(c["delta"].get("content") or "" for c in choices)
    else:
        text = answer.json()["choices"][0]["message"]["content"] or ""
    assert text == STOPS[key, stop]
