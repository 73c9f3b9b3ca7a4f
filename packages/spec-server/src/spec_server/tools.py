"""Tool calls: what the model wrote to calls with JSON arguments. The parsers are mlx-lm's.

Also checks the tools of a request, and turns calls of earlier turns into what chat templates take.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from spec_server.answer import ParseCall, ToolCall
from spec_server.errors import Refusal

_log = logging.getLogger("spec_server")

# A back-slash that begins no escape of JSON, behind any number of escaped ones.
_LONE = re.compile(r"""(?<!\\)((?:\\\\)*)\\(?!["\\/bfnrtu])""")
# Whatever a parser of untrusted text may raise; none of it is the client's fault.
_PARSE_ERRORS = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
)


def call_parser(parse: Callable[..., Any], tools: Sequence[dict[str, Any]]) -> ParseCall:
    """A parser of the body of a call.

    Args:
        parse: mlx-lm's `parse_tool_call` of the model's format.
        tools: The tools of the request, in the function format of OpenAI.
    """

    def read(body: str) -> list[ToolCall] | None:
        found = parse(body, list(tools))
        calls = found if isinstance(found, list) else [found]
        return [_call(call, tools) for call in calls] or None

    def parsed(body: str) -> list[ToolCall] | None:
        try:
            return read(body)
        except _PARSE_ERRORS as error:
            problem = error
        mended = _mended(body)
        if mended != body:
            with suppress(*_PARSE_ERRORS):
                return read(mended)
        _log.warning("[tools] A call could not be read (%s); it stays text.", problem)
        return None

    return parsed


def _mended(body: str) -> str:
    """A body with what models leave unescaped in JSON: back-slashes of patterns, line breaks."""
    body = _LONE.sub(r"\1\\\\", body)
    for start in (0, max(body.find("{"), 0)):  # behind a name, in some syntaxes
        with suppress(ValueError, RecursionError):
            whole = json.loads(body[start:], strict=False)
            return body[:start] + json.dumps(whole, ensure_ascii=False)
    return body


def bare_parser(
    tools: Sequence[dict[str, Any]], parse: Callable[..., Any] | None = None
) -> ParseCall:
    """A parser of calls without their opening mark, of declared tools only.

    Args:
        tools: The tools of the request.
        parse: mlx-lm's `parse_tool_call`, for bodies that are no JSON.
    """
    names = {tool["function"]["name"] for tool in tools}

    def parsed(body: str) -> list[ToolCall] | None:
        try:
            if parse is not None and not body.lstrip().startswith("{"):
                found = parse(body, list(tools))
            else:
                found = json.loads(body)
                if "parameters" in found and "arguments" not in found:
                    found["arguments"] = found["parameters"]
                if "arguments" not in found:
                    return None
            calls = found if isinstance(found, list) else [found]
            unknown = next((c["name"] for c in calls if c["name"] not in names), None)
            if unknown is not None:
                _log.warning(
                    '[tools] A call of "%s", which the request lacks, stays text.', unknown
                )
                return None
            return [_call(call, tools) for call in calls] or None
        except _PARSE_ERRORS:
            return None

    return parsed


def _call(found: Any, tools: Sequence[dict[str, Any]]) -> ToolCall:
    name, arguments = found["name"], found.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    arguments = _typed(arguments, _properties(name, tools))
    check_unicode([name, arguments])
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _properties(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    """A number where the schema wants a string becomes one; the rest stays."""
    result = {}
    for key, value in arguments.items():
        schema = properties.get(key)
        wants_text = isinstance(schema, dict) and schema.get("type") == "string"
        if wants_text and isinstance(value, bool | int | float):
            value = json.dumps(value)
        result[key] = value
    return result


def check_unicode(value: Any) -> None:
    """See that parsed JSON can be written as UTF-8: an escape may be half of a surrogate pair.

    Raises:
        UnicodeEncodeError: it cannot.
    """
    json.dumps(value, ensure_ascii=False).encode()


def history_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments of a call of an earlier turn, as chat templates take them.

    Raises:
        Refusal: they are not an object.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
            check_unicode(arguments)
        except (ValueError, RecursionError) as error:
            raise Refusal(
                f"{where} must be a JSON object, got text that is not JSON ({error}).", param=where
            ) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise Refusal(
            f"{where} must be a JSON object, got {type(arguments).__name__}.", param=where
        )
    return arguments
