"""Body of /v1/responses, stateless: the whole conversation comes with each request."""

from typing import Annotated, Any, Literal

from pydantic import Field

from spec_server.errors import Refusal
from spec_server.guides import ANY_OBJECT
from spec_server.prompts import Chat
from spec_server.schema.base import (
    MOST_LOGPROBS,
    NO_DEGREES,
    NO_VERBOSITY,
    ChatWish,
    Extension,
    Limit,
    MinP,
    Seed,
    Strict,
    Temperature,
    Texts,
    TopK,
    TopP,
    Wish,
    joined_text,
    must_call,
    sampling_of,
)
from spec_server.tools import history_arguments


class ContentPart(Strict):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: Any = None
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class CallOutputItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Strict):
    """Reasoning of an earlier turn."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class TextFormat(Strict):
    """What shape the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    """Settings of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """Settings of the reasoning."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: None = None


class NamedTool(Strict):
    """A tool that must be called."""

    type: str
    name: str | None = None


class StreamOptions(Strict):
    """How to stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Strict):
    """Body of /v1/responses."""

    model: str
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Texts | None = None
    client_metadata: Texts | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    x_spec: Extension | None = None


def responses_wish(body: ResponsesBody, *, knows_effort: bool) -> ChatWish:
    """What a responses body asks for.

    Raises:
        Refusal: it asks for what this server does not do.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _turns(body.input)
    tools, forced, notices = _tools(body)
    effort = body.reasoning.effort if body.reasoning is not None else None
    thinking = None if effort is None else effort != "none"
    if effort not in (None, "none") and not knows_effort:
        notices = (*notices, NO_DEGREES)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        notices = (*notices, NO_VERBOSITY)
    wants_logprobs = body.top_logprobs or "message.output_text.logprobs" in (body.include or ())
    extension = body.x_spec or Extension()
    wish = Wish(
        sampling=sampling_of(body),
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        max_draft=extension.max_draft,
        one_call=body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool),
        notices=notices,
    )
    chat = Chat(
        tuple(messages),
        tools,
        thinking,
        effort=effort if knows_effort else None,
        must_call=forced,
        one_call=wish.one_call,
        schema=_schema(body),
    )
    return ChatWish(chat, wish, _echo(body))


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What the response repeats of its request."""
    told = body.model_dump(
        include={"text", "reasoning", "tool_choice"}, by_alias=True, exclude_none=True
    )
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "reasoning": told.get("reasoning"),
        "text": {"format": {"type": "text"}, **told.get("text", {})},
        "tool_choice": told.get("tool_choice", "auto"),
        "tools": [{"strict": None, **t} for t in body.tools or () if t.get("type") == "function"],
        "top_logprobs": body.top_logprobs or 0,
    }


def _tools(
    body: ResponsesBody,
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[str, ...]]:
    """The tools offered, those one of which must be called, and notices about others."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.type != "function":
        raise Refusal(
            f'"tool_choice" of type "{choice.type}" is not supported by this server.',
            param="tool_choice",
        )
    if isinstance(choice, NamedTool) and choice.name is None:
        raise Refusal('"tool_choice" of type "function" needs "name".', param="tool_choice")
    tools: list[dict[str, Any]] = []
    notices: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        kind, name = tool.get("type"), tool.get("name")
        if kind != "function":
            notices.append(f'The tool of type "{kind}" is not run here and was left out.')
            continue
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        description = tool.get("description") or ""
        if not (isinstance(name, str) and name and isinstance(parameters, dict)):
            raise Refusal(f'"tools[{i}]" must have a "name" and "parameters".', param=f"tools[{i}]")
        function = {"name": name, "description": str(description), "parameters": parameters}
        tools.append({"type": "function", "function": function})
    if choice == "none":
        return (), (), tuple(notices)
    forced: tuple[str, ...] = ()
    if isinstance(choice, NamedTool) or choice == "required":
        forced = must_call(tools, choice.name if isinstance(choice, NamedTool) else None)
    return tuple(tools), forced, tuple(notices)


def _schema(body: ResponsesBody) -> dict[str, Any] | None:
    shape = body.text.format if body.text is not None else None
    if shape is not None and shape.type != "json_schema" and shape.schema_ is not None:
        raise Refusal(
            f'"text.format.schema" is only for the type "json_schema", got "{shape.type}".',
            param="text.format",
        )
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return ANY_OBJECT
    if shape.schema_ is None:
        raise Refusal('"text.format" of type "json_schema" needs "schema".', param="text.format")
    return shape.schema_


def _turns(items: list[Item]) -> list[dict[str, Any]]:
    """Items as chat templates take them; calls that follow each other are one assistant turn."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for i, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            reasoning += _text(item.content or item.summary or [])
            continue
        if isinstance(item, CallItem):
            arguments = history_arguments(item.arguments, f"input[{i}].arguments")
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": arguments},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            text = item.output if isinstance(item.output, str) else _text(item.output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
        else:
            role = "system" if item.role == "developer" else item.role
            text = item.content if isinstance(item.content, str) else _text(item.content)
            messages.append({"role": role, "content": text})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = (
                messages[-1].get("reasoning_content", "") + reasoning
            )
        reasoning = ""
    return messages or [{"role": "user", "content": ""}]


def _text(parts: list[ContentPart]) -> str:
    return joined_text([part.text or part.refusal or "" for part in parts])
