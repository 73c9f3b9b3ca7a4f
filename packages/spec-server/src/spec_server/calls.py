"""Grammars of tool calls in a model's own syntax, so that a call can be forced.

Known are those whose arguments are JSON: `<tool_call>` objects (Hermes, Qwen), Mistral's two, and
the bare object of Llama 3. Marks that are one token are asked for as that token, as the model
was trained. Knows nothing about requests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spec_server.guides import ANY_OBJECT, with_bounded_space

Kind = Literal["tagged", "list", "header", "bare"]
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls.

    Attributes:
        kind: "tagged": an object between two marks; "list": a mark and a list of objects; "header":
            a mark, the name, another mark and the arguments; "bare": an object and nothing else.
        marks: The marks as terms of a grammar: start and end, start alone, start and the one
            before the arguments, none.
    """

    kind: Kind
    marks: tuple[str, ...] = ()


def term(text: str, ids: Sequence[int]) -> str:
    """A mark as a term of a grammar: its token where it is one, else its text."""
    return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)


def call_grammar(
    syntax: CallSyntax,
    tools: Sequence[dict[str, Any]],
    *,
    one: bool,
    answer: dict[str, Any] | None = None,
) -> str:
    """What an answer must match that is calls.

    Args:
        syntax: The model's.
        tools: The tools that may be called, in OpenAI's function format.
        one: Exactly one call; else one or more where the syntax can hold several.
        answer: A schema that the answer may satisfy instead of calling.
    """
    functions = [tool["function"] for tool in tools]
    rules = [_rule(syntax, i, function) for i, function in enumerate(functions)]
    call = " | ".join(f"call_{i}" for i in range(len(functions)))
    start, end, *_ = (*syntax.marks, "", "")
    several = not one and syntax.kind != "bare"
    whole = {
        "tagged": f'{start} "\\n" call "\\n" {end}',
        "list": f'{start} "[" call' + (' (", " call)*' if several else "") + ' "]"',
        "header": f"{start} call",
        "bare": "call",
    }[syntax.kind]
    if several and syntax.kind != "list":
        between = ' "\\n" ' if syntax.kind == "tagged" else " "
        whole = f"one ({between}one)*\none: {whole}"
    lines = [f"calls: {whole}", f"call: {call}", *rules]
    if answer is None:
        return "\n".join(["start: calls", *lines]) + "\n"
    return "\n".join(["start: calls | answer", f"answer: %json {_json(answer)}", *lines]) + "\n"


def _rule(syntax: CallSyntax, i: int, function: dict[str, Any]) -> str:
    # Under a name of its own its references mean itself, wherever it stands. Arguments are objects.
    schema = {"$id": f"tool:{i}", **(function.get("parameters") or ANY_OBJECT)}
    schema.pop("$schema", None)
    if schema.get("type") != "object":
        schema = {"allOf": [schema, ANY_OBJECT]}
    name = function["name"]
    if syntax.kind == "header":
        return f"call_{i}: {json.dumps(name)} {syntax.marks[1]} %json {_json(schema, spaced=True)}"
    arguments = "parameters" if syntax.kind == "bare" else "arguments"
    whole = {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: schema},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
    return f"call_{i}: %json {_json(whole, spaced=True)}"


def _json(schema: dict[str, Any], *, spaced: bool = False) -> str:
    return json.dumps({"x-guidance": _SPACING, **schema} if spaced else with_bounded_space(schema))
