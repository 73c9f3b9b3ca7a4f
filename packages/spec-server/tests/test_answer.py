import time

import pytest

from spec_server.answer import Marks, Part, Splitter, ToolCall
from spec_server.harmony import Harmony, parse_call
from spec_server.tools import bare_parser, call_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
        },
    }
]
MARKS = Marks(("<think>", "</think>"), ("<tool_call>", "</tool_call>"))


def parse_json(text, tools):
    import json

    return json.loads(text)


def split(text, chunk=10**9, marks=MARKS, tools=TOOLS):
    """Kinds with joined text, calls apart. Each text stands where it says."""
    parse = call_parser(parse_json, tools) if tools else None
    splitter = Splitter(marks, parse, bare_parser(tools) if tools else None)
    parts: list[Part] = []
    for start in range(0, len(text), chunk):
        parts += splitter.push(text[start : start + chunk])
    parts += splitter.finish()
    joined: list = []
    for part in parts:
        assert part.kind != "text" or text[part.at :].startswith(part.text)
        if part.call is not None:
            joined.append(("call", part.call))
        elif joined and joined[-1][0] == part.kind:
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        else:
            joined.append((part.kind, part.text))
    return joined


CALL = ToolCall("f", '{"x": 1}')
BODY = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL_OF_ENDS = ToolCall("f", '{"code": "</tool_call> \\\\\\"</tool_call>\\\\"}')
BODY_OF_ENDS = f'<tool_call>{{"name": "f", "arguments": {CALL_OF_ENDS.arguments}}}</tool_call>'
CASES = {
    "plain": ("Hello there.", [("text", "Hello there.")]),
    "leading space": (" \n Hi", [("text", " \n Hi")]),
    "only spaces": (" \n ", [("text", " \n ")]),
    "empty": ("", []),
    "reasoning": ("<think>\nhm\n</think>\n\nYes.", [("reasoning", "hm\n"), ("text", "Yes.")]),
    "empty reasoning": ("<think>\n\n</think>\n\nYes.", [("text", "Yes.")]),
    "reasoning cut": ("<think>\nhm", [("reasoning", "hm")]),
    "think tag later is text": ("A <think> b </think>", [("text", "A <think> b </think>")]),
    "two blocks": (
        "<think>a</think>b<think>c</think>",
        [("reasoning", "a"), ("text", "b<think>c</think>")],
    ),
    "call": (BODY, [("call", CALL)]),
    "text then call": ("Look:\n\n" + BODY, [("text", "Look:"), ("call", CALL)]),
    "two calls": (BODY + "\n" + BODY, [("call", CALL), ("call", CALL)]),
    "call then text": (BODY + "\nDone", [("call", CALL), ("text", "Done")]),
    "call in reasoning": (
        f"<think>maybe {BODY} no</think>ok",
        [("reasoning", f"maybe {BODY} no"), ("text", "ok")],
    ),
    "quoted call": (f"`{BODY}`", [("text", f"`{BODY}`")]),
    "fenced call, then a real one": (
        f"```\n{BODY}\n```\n{BODY}",
        [("text", f"```\n{BODY}\n```"), ("call", CALL)],
    ),
    "broken call": (
        "a <tool_call>{oops}</tool_call> b",
        [("text", "a <tool_call>{oops}</tool_call> b")],
    ),
    "an end mark in an argument": (
        BODY_OF_ENDS + "\nDone",
        [("call", CALL_OF_ENDS), ("text", "Done")],
    ),
    "an end mark in an argument, then another call": (
        BODY_OF_ENDS + BODY,
        [("call", CALL_OF_ENDS), ("call", CALL)],
    ),
    "an end mark in an argument of a call without its end": (
        BODY_OF_ENDS.removesuffix("</tool_call>"),
        [("call", CALL_OF_ENDS)],
    ),
    "an end mark in an argument that is cut": (
        '<tool_call>{"name": "f", "arguments": {"code": "a </tool_call> b',
        [("text", '<tool_call>{"name": "f", "arguments": {"code": "a </tool_call> b')],
    ),
    "a quote too many, then a call": (
        '<tool_call>{"a": "5""}</tool_call>\n' + BODY,
        [("text", '<tool_call>{"a": "5""}</tool_call>'), ("call", CALL)],
    ),
    "a quote too many, a call, a quote too many": (
        f'<tool_call>{{"}}</tool_call>{BODY}<tool_call>{{"}}</tool_call>',
        [
            ("text", '<tool_call>{"}</tool_call>'),
            ("call", CALL),
            ("text", '<tool_call>{"}</tool_call>'),
        ],
    ),
    "cut call": ('<tool_call>{"name": "f"', [("text", '<tool_call>{"name": "f"')]),
    "call without its end": (BODY.removesuffix("\n</tool_call>"), [("call", CALL)]),
    "bare call": ('{"name": "f", "arguments": {"x": 1}}', [("call", CALL)]),
    "call without its beginning": (
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        [("call", CALL)],
    ),
    "call without its beginning, then text and another one": (
        '{"name": "f", "arguments": {"x": 1}}</tool_call>\nMore.\n' + BODY,
        [("call", CALL), ("text", "More."), ("call", CALL)],
    ),
    "call without its beginning after reasoning": (
        '<think>a</think>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        [("reasoning", "a"), ("call", CALL)],
    ),
    "unknown call without its beginning": (
        '{"name": "g", "arguments": {}}</tool_call> ok',
        [("text", '{"name": "g", "arguments": {}}</tool_call> ok')],
    ),
    "an end mark in text": ("a </tool_call> b", [("text", "a </tool_call> b")]),
    "JSON, then a call": ('{"a": 1}\n' + BODY, [("text", '{"a": 1}'), ("call", CALL)]),
    "bare call, then a marked one": (
        '{"name": "f", "arguments": {"x": 1}}\n' + BODY,
        [("call", CALL), ("call", CALL)],
    ),
    "nearly a call": ("<func", [("text", "<func")]),
    "bare JSON": ('{"a": 1}', [("text", '{"a": 1}')]),
    "bare call of an unknown tool": (
        '{"name": "g", "arguments": {}}',
        [("text", '{"name": "g", "arguments": {}}')],
    ),
    "no arguments": (
        '<tool_call>{"name": "f"}</tool_call>',
        [("call", ToolCall("f", "{}"))],
    ),
    "null arguments": (
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        [("call", ToolCall("f", "{}"))],
    ),
    "a number where the schema says string": (
        '<tool_call>{"name": "f", "arguments": {"code": 123}}</tool_call>',
        [("call", ToolCall("f", '{"code": "123"}'))],
    ),
    "angle brackets": ("a < b <tool b>", [("text", "a < b <tool b>")]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 10**9])
def test_an_answer_splits_alike_however_it_is_cut(name, chunk):
    text, want = CASES[name]
    assert split(text, chunk) == want


def test_without_tools_their_marks_are_text():
    assert split(BODY, tools=None, marks=Marks(MARKS.think)) == [("text", BODY)]


def test_without_reasoning_its_marks_are_text():
    assert split("<think>a</think>", marks=Marks()) == [("text", "<think>a</think>")]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_reasoning_that_the_prompt_opened(chunk):
    marks = Marks(MARKS.think, MARKS.call, in_reasoning=True)
    assert split("\nhm</think>\n\nYes", chunk, marks) == [("reasoning", "hm"), ("text", "Yes")]
    assert split("hm", chunk, marks) == [("reasoning", "hm")]
    assert split("a</think>" + BODY, chunk, marks) == [("reasoning", "a"), ("call", CALL)]


def test_reasoning_and_text_flow_before_the_call_is_known():
    splitter = Splitter(MARKS, call_parser(parse_json, TOOLS), bare_parser(TOOLS))
    assert [p.kind for p in splitter.push("<think>long thoughts ")] == ["reasoning"]
    assert [p.kind for p in splitter.push("end</think>\n\nSome text")] == ["reasoning", "text"]
    assert splitter.push("<tool_call>{") == []


def test_a_format_without_an_end_mark_takes_the_rest():
    marks = Marks(None, ("[CALL]", ""))
    assert split('[CALL]{"name": "f", "arguments": {"x": 1}}', 1, marks) == [("call", CALL)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"name": "g", "arguments": {}}</tool_call>', 'A call of "g", which the request lacks'),
        ('Sure.\n{"name": "f"}</tool_call>', 'holds "</tool_call>" without "<tool_call>"'),
    ],
)
def test_a_call_that_stays_text_is_logged(caplog, text, told):
    assert split(text, 3) == [("text", text)]
    assert told in caplog.text


def test_a_stray_end_mark_is_logged_once_an_answer(caplog):
    splitter = Splitter(MARKS, call_parser(parse_json, TOOLS), bare_parser(TOOLS))
    for piece in 20 * ["Well", "</tool_call>", " "]:
        splitter.push(piece)
    assert caplog.text.count("it stays text") == 1


LONG = {  # what an answer begins and goes on with
    "a call cut in its JSON": ('<tool_call>{"name": "f", "arguments": {"code": "', "a "),
    "a call cut in its XML": ("<tool_call>\n<function=f>", "a "),
    "a string full of end marks": ('<tool_call>{"name": "', "</tool_call> "),
    "end marks between strings": ('<tool_call>{"', '</tool_call>", "'),
    "beginnings of an end mark": ("<tool_call>{", "</tool_call"),
    "an object": ("{", "< "),
    "line breaks": ("a", "\n"),
    "line breaks at first": ("", "\n"),
    "reasoning": ("<think>", "</ "),
    "text": ("a", "<tool"),
    "channels: a call": ("<|channel|>commentary to=functions.f<|message|>{", "< "),
    "channels: a header": ("<|channel|>analysis", " to"),
    "channels: line breaks": ("", "\n"),
    "channels: text": ("<|channel|>final<|message|>", "<|"),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_answer_takes_no_longer_for_its_next_token(name):
    first, more = LONG[name]
    parse = call_parser(parse_call if "channels" in name else parse_json, TOOLS)

    def seconds(n_before):
        """Of 20 tokens after so many; the best of a few tries, which a busy machine is not."""
        splitter = Splitter(MARKS, parse, bare_parser(TOOLS))
        if "channels" in name:
            splitter = Harmony(parse)
        splitter.push(first + more * n_before)
        taken = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(20):
                splitter.push(more)
            taken.append(time.perf_counter() - start)
        return min(taken)

    assert seconds(300_000) < 5 * seconds(100) + 1e-4


def test_an_answer_of_calls_that_are_none_is_not_read_again_for_each():
    """Each begins a string that the next ones are in, up to the end of the answer."""

    def seconds(n):
        start = time.perf_counter()
        split('<tool_call>{"' + '</tool_call><tool_call>{\\"' * n + '"</tool_call>')
        return time.perf_counter() - start

    assert seconds(6000) < 8 * min(seconds(2000) for _ in range(3)) + 0.1
