"""Every call syntax that mlx-lm has a parser for: read whole or in pieces, never a crash."""

import importlib
import json
import random

import pytest

from spec_server.answer import Marks, Splitter
from spec_server.tools import bare_parser, call_parser

KINDS = {"city": "string", "n": "integer", "flag": "boolean"}
PARAMETERS = {"type": "object", "properties": {k: {"type": v} for k, v in KINDS.items()}}
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
# parser -> a call of "get" with the text "123" for a string, and a call of "now"
WRITTEN = {
    "json_tools": (
        '<tool_call>\n{"name": "get", "arguments": {"city": "123", "n": 3}}\n</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get>\n<parameter=city>\n123\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm47": (
        "<tool_call>get<arg_key>city</arg_key><arg_value>123</arg_value><arg_key>n</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "<tool_call>now</tool_call>",
    ),
    "gemma4": (
        '<|tool_call>call:get{city:<|"|>123<|"|>,n:3}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
    ),
    "function_gemma": (
        "<start_function_call>call:get{city:<escape>123<escape>,n:3}<end_function_call>",
        "<start_function_call>call:now{}<end_function_call>",
    ),
    "pythonic": (
        '<|tool_call_start|>[get(city="123", n=3)]<|tool_call_end|>',
        "<|tool_call_start|>[now()]<|tool_call_end|>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
        '{"city": "123", "n": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get">\n<parameter name="city">123</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "mistral": ('[TOOL_CALLS]get[ARGS]{"city": "123", "n": 3}', "[TOOL_CALLS]now[ARGS]{}"),
    "minicpm5": (
        '<function name="get"><param name="city">123</param><param name="n">3</param></function>',
        '<function name="now"></function>',
    ),
}


def split(name: str, text: str, chunk: int):
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    parse = parser.parse_tool_call
    marks = Marks(None, (parser.tool_call_start, parser.tool_call_end))
    splitter = Splitter(marks, call_parser(parse, TOOLS), bare_parser(TOOLS, parse))
    parts = [p for at in range(0, len(text), chunk) for p in splitter.push(text[at : at + chunk])]
    parts += splitter.finish()
    calls = [(p.call.name, json.loads(p.call.arguments)) for p in parts if p.call]
    return calls, "".join(p.text for p in parts)


@pytest.mark.parametrize("chunk", [1, 7, 10**6])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_familys_own_syntax_is_read(name, chunk):
    get, now = WRITTEN[name]
    assert split(name, f"Look: {get}", chunk) == ([("get", {"city": "123", "n": 3})], "Look:")
    assert split(name, now, chunk) == ([("now", {})], "")


@pytest.mark.parametrize("chunk", [1, 7, 10**6])
@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_a_call_whose_opening_mark_is_missing_is_read(name, chunk):
    get, now = (text.removeprefix("<tool_call>").lstrip() for text in WRITTEN[name])
    assert split(name, get, chunk) == ([("get", {"city": "123", "n": 3})], "")
    calls, text = split(name, f"{get}\n<tool_call>\n{now}", chunk)
    assert [name for name, _ in calls] == ["get", "now"] and not text
    unknown = get.replace("get", "got")
    assert split(name, unknown, chunk) == ([], unknown)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\d+\.\w*", r"\d+\.\w*"),
        (r"a\\b\ c", r"a\b\ c"),
        ("one\ntwo\t3", "one\ntwo\t3"),
        (r"\n\"", '\n"'),
    ],
)
def test_what_models_leave_unescaped_in_json_is_mended(written, meant):
    """A pattern or lines of code in an argument lost the call: ml-explore/mlx-lm#899."""
    for text in (
        f'<tool_call>{{"name": "get", "arguments": {{"city": "{written}"}}}}</tool_call>',
        f'<tool_call>{{"name": "get", "arguments": {{"city": "{written}", "n": 3}}}}</tool_call>',
    ):
        ((name, arguments),), rest = split("json_tools", text, 7)
        assert (name, arguments["city"], rest) == ("get", meant, "")
    ((name, arguments),), _ = split("mistral", f'[TOOL_CALLS]get[ARGS]{{"city": "{written}"}}', 7)
    assert arguments["city"] == meant


@pytest.mark.parametrize("name", WRITTEN)
def test_a_damaged_call_is_a_call_or_text(name):
    rng = random.Random(name)
    for text in WRITTEN[name]:
        for _ in range(60):
            letters = list(text)
            for _ in range(rng.randrange(1, 6)):
                letters[rng.randrange(len(letters))] = rng.choice('<>{}[]()"=:,\\x\0\n')
            damaged = "".join(letters)
            calls, shown = split(name, damaged, 5)
            assert calls or shown.strip() == damaged.strip()
            assert all(isinstance(arguments, dict) for _, arguments in calls)
