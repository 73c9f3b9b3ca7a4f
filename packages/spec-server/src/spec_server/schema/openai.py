"""Bodies of /v1/chat/completions and /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from spec_server.errors import Refusal
from spec_server.guides import ANY_OBJECT
from spec_server.prompts import Chat
from spec_server.schema.base import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    ChatWish,
    Extension,
    Limit,
    MinP,
    Penalty,
    Repetition,
    SchemaFormat,
    Seed,
    Strict,
    Temperature,
    Texts,
    TopK,
    TopP,
    Wish,
    biases_of,
    joined_text,
    must_call,
    sampling_of,
    stops_of,
)
from spec_server.tools import history_arguments


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(Strict):
    """A piece of text."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Strict):
    """What was called."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Any = None


class PastCall(Strict):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class Message(Strict):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(Strict):
    """A tool the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool in its wrapping."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(Strict):
    """What shape the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ChatExtension(Extension):
    """What a chat may set beside it."""

    by_token: bool | None = None


class Common(Strict):
    """Fields of both OpenAI endpoints."""

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    max_tokens: Limit | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logit_bias: dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    x_spec: Extension | None = None


class ChatBody(Common):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Texts | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    x_spec: ChatExtension | None = None


class CompletionBody(Common):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


def wish_of(body: ChatBody | CompletionBody, **more: Any) -> Wish:
    """The dialect-free part of a body."""
    extension = body.x_spec or Extension()
    return Wish(
        sampling=sampling_of(body),
        stop=stops_of(body.stop, "stop"),
        n=body.n or 1,
        stream=bool(body.stream),
        biases=biases_of(body.logit_bias),
        max_draft=extension.max_draft,
        **more,
    )


def chat_wish(body: ChatBody, *, knows_effort: bool) -> ChatWish:
    """What a chat body asks for.

    Args:
        body: The checked body.
        knows_effort: The model's template knows `reasoning_effort`.

    Raises:
        Refusal: fields contradict each other, or ask for what this server does not do.
    """
    if body.stream_options is not None and not body.stream:
        raise Refusal('"stream_options" is only for "stream": true.', param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal('"top_logprobs" needs "logprobs": true.', param="top_logprobs")
    by_token = body.x_spec is not None and bool(body.x_spec.by_token)
    if by_token and not body.stream:
        raise Refusal('"x_spec.by_token" is only for "stream": true.', param="x_spec.by_token")
    limits = [x for x in (body.max_tokens, body.max_completion_tokens) if x is not None]
    tools, forced = _tools(body)
    variables = {k: v for k, v in (body.chat_template_kwargs or {}).items() if v is not None}
    thinking, effort = _thinking(body, variables, knows_effort)
    chat = Chat(
        tuple(_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)),
        tools,
        thinking,
        effort=effort,
        must_call=forced,
        one_call=body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool),
        schema=_schema(body),
        variables=tuple(variables.items()),
    )
    wish = wish_of(
        body,
        max_tokens=min(limits) if limits else None,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        one_call=chat.one_call,
        by_token=by_token,
    )
    return ChatWish(chat, wish)


def completion_prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion body, one per choice.

    Raises:
        Refusal: there is none, or one is empty.
    """
    prompt = body.prompt
    prompts: list[Any]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts or any(len(p) == 0 for p in prompts):
        raise Refusal('"prompt" must hold at least one token, got none.', param="prompt")
    if len(prompts) * (body.n or 1) > 64:
        raise Refusal(
            f'"prompt" must ask for at most 64 choices, got {len(prompts)}.', param="prompt"
        )
    return prompts


def _tools(body: ChatBody) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The tools offered, none where the request forbids calls; and those one of which must be."""
    choice = body.tool_choice
    if choice == "none":
        return (), ()
    tools = tuple(tool_of(t.function) for t in body.tools or ())
    if choice == "auto" and not tools:
        raise Refusal('"tool_choice" needs "tools".', param="tool_choice")
    if isinstance(choice, NamedTool):
        return tools, must_call(tools, choice.function.name)
    return tools, must_call(tools) if choice == "required" else ()


def tool_of(function: FunctionSpec) -> dict[str, Any]:
    """A tool as chat templates take it."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": parameters,
        },
    }


def _schema(body: ChatBody) -> dict[str, Any] | None:
    shape = body.response_format
    if shape is not None and shape.type != "json_schema" and shape.json_schema is not None:
        raise Refusal(
            '"response_format.json_schema" is only for the type "json_schema", got '
            f'"{shape.type}".',
            param="response_format",
        )
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return ANY_OBJECT
    if shape.json_schema is None or shape.json_schema.schema_ is None:
        raise Refusal(
            '"response_format" of type "json_schema" needs "json_schema": {"schema": ...}.',
            param="response_format",
        )
    return shape.json_schema.schema_


def _thinking(
    body: ChatBody, variables: dict[str, Any], knows_effort: bool
) -> tuple[bool | None, str | None]:
    """Whether to reason, and the effort for templates that know it; taken out of the variables."""
    effort, own = body.reasoning_effort, variables.pop("enable_thinking", None)
    if own is not None and not isinstance(own, bool):
        raise Refusal(
            f'"chat_template_kwargs.enable_thinking" must be true or false, got {own!r:.40}.',
            param="chat_template_kwargs",
        )
    said = {
        "enable_thinking": body.enable_thinking,
        "chat_template_kwargs": own,
        "reasoning_effort": None if effort is None else effort != "none",
    }
    fields = [name for name, wants in said.items() if wants is not None]
    if len({said[name] for name in fields}) > 1:
        told = " and ".join(f'"{name}"' for name in fields)
        raise Refusal(f"{told} must agree about reasoning.", param=fields[0])
    thinking = said[fields[0]] if fields else None
    if effort is None:
        return thinking, None
    if effort == "none":
        return False, None
    if not knows_effort:
        raise Refusal(
            f'"reasoning_effort" must be "none" for this model, which has no degrees of it, got '
            f'"{effort[:40]}". Use "enable_thinking".',
            param="reasoning_effort",
        )
    return thinking, effort


def _message(message: Message, where: str) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = joined_text([part.text or part.refusal or "" for part in content])
    result: dict[str, Any] = {"role": role, "content": content or message.refusal or ""}
    if message.role != "assistant":
        if message.tool_calls:
            raise Refusal(f'"{where}.tool_calls" is for assistant messages only.', param=where)
        if content is None:
            raise Refusal(f'"{where}.content" must hold text, got none.', param=where)
    if message.role == "tool" and message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    calls = [
        {
            "id": call.id or f"call_{i}",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": history_arguments(
                    call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"
                ),
            },
        }
        for i, call in enumerate(message.tool_calls or ())
    ]
    if calls:
        result["tool_calls"] = calls
    return result
