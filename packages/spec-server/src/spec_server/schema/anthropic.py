"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from spec_server.errors import Refusal
from spec_server.prompts import Chat
from spec_server.schema.base import (
    NO_DEGREES,
    NO_REASONING,
    ChatWish,
    Extension,
    Limit,
    MinP,
    Seed,
    Strict,
    TopK,
    TopP,
    Wish,
    joined_text,
    must_call,
    sampling_of,
    stops_of,
)
from spec_server.tools import history_arguments

_BY_TYPE = Field(discriminator="type")


class CacheControl(Strict):
    """A hint where a prefix worth keeping ends. Every prefix is kept here anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class RedactedBlock(Strict):
    """Reasoning of an earlier turn that nobody here can read; it stays out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: Any = None
    cache_control: CacheControl | None = None
    caller: Any = None


class MediaBlock(BaseModel):
    """An image or a document: read, so that it can be refused where it stands."""

    type: Literal["image", "document"]


class ToolResultBlock(Strict):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | MediaBlock, _BY_TYPE]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock | MediaBlock,
    _BY_TYPE,
]


class Message(Strict):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Strict):
    """A tool of the client's; tools that run on the provider's side have another type."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    max_uses: int | None = None
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None
    user_location: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Whether to call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether to reason."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Metadata(Strict):
    """Who asks; used for nothing here, and written nowhere."""

    user_id: str | None = None


class OutputFormat(Strict):
    """What shape the answer must have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Shape and effort of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class KeepThinking(Strict):
    """Reasoning of earlier turns stays, all of it, as it does here anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    """What to take out of the conversation: nothing."""

    edits: list[KeepThinking] | None = None


class CountBody(Strict):
    """Body of /v1/messages/count_tokens."""

    model: str
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: Limit
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    x_spec: Extension | None = None


def messages_wish(body: MessagesBody, *, knows_effort: bool, reasons: bool) -> ChatWish:
    """What a messages body asks for.

    Args:
        body: The checked body.
        reasons: The model marks its reasoning.
        knows_effort: The model's template knows `reasoning_effort`.

    Raises:
        Refusal: it asks for what this server does not do.
    """
    chat, notices = chat_of(body, knows_effort=knows_effort)
    config = body.output_config or OutputConfig()
    if config.format is not None and body.output_format is not None:
        raise Refusal(
            "output_format: the same as output_config.format; give one.", param="output_format"
        )
    shape = config.format or body.output_format
    if shape is not None:
        chat = replace(chat, schema=shape.schema_)
    if config.effort is not None and not knows_effort:
        notices = (*notices, NO_DEGREES)
    extension = body.x_spec or Extension()
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled" and not reasons:
        notices = (*notices, NO_REASONING)
    wish = Wish(
        sampling=sampling_of(body),
        max_tokens=body.max_tokens,
        stop=stops_of(body.stop_sequences, "stop_sequences"),
        stream=bool(body.stream),
        max_draft=extension.max_draft,
        reasoning_tokens=_budget(thinking),
        hide_reasoning=thinking is not None and thinking.display == "omitted",
        one_call=chat.one_call,
        notices=notices,
    )
    return ChatWish(chat, wish)


def _budget(thinking: Thinking | None) -> int | None:
    """Most tokens of reasoning.

    Raises:
        Refusal: a budget for a kind of thinking that has none.
    """
    if thinking is None or thinking.budget_tokens is None:
        return None
    if thinking.type != "enabled":
        raise Refusal(
            f'thinking.budget_tokens: only for the type "enabled", got "{thinking.type}".',
            param="thinking.budget_tokens",
        )
    return thinking.budget_tokens


def chat_of(body: CountBody, *, knows_effort: bool) -> tuple[Chat, tuple[str, ...]]:
    """The conversation of a body, and notices about tools that were left out.

    Raises:
        Refusal: it asks for what this server does not do.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        system = body.system
        if not isinstance(system, str):
            system = "\n\n".join(block.text for block in system)
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        messages += _turn(message, f"messages.{i}")
    tools, forced, notices = _tools(body)
    choice = body.tool_choice
    one = choice is not None and (choice.type == "tool" or bool(choice.disable_parallel_tool_use))
    thinking = None if body.thinking is None else body.thinking.type != "disabled"
    last = messages[-1]
    if last.keys() == {"role", "content"} and last["role"] == "assistant":
        if not last["content"].strip():
            messages.pop()  # an answer that has not begun
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    chat = Chat(
        tuple(messages),
        tools,
        thinking,
        continue_last=continues and bool(last["content"].strip()),
        must_call=forced,
        one_call=one,
        effort=body.output_config.effort if body.output_config and knows_effort else None,
    )
    return chat, notices


def _tools(
    body: CountBody,
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[str, ...]]:
    """The tools offered, those one of which must be called, and notices about others."""
    choice = body.tool_choice
    tools: list[dict[str, Any]] = []
    notices: list[str] = []
    for tool in body.tools or ():
        if tool.type not in (None, "custom") or tool.input_schema is None:
            notices.append(f'The tool "{tool.name}" runs on no server here and was left out.')
            continue
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
        )
    forced: tuple[str, ...] = ()
    if choice is not None and choice.type != "tool" and choice.name is not None:
        raise Refusal(
            f'tool_choice.name: only for the type "tool", got "{choice.type}".',
            param="tool_choice.name",
        )
    if choice is not None and choice.type == "none":
        tools = []
    elif choice is not None and choice.type == "tool" and choice.name is None:
        raise Refusal('tool_choice.name: needed for the type "tool".', param="tool_choice.name")
    elif choice is not None and choice.type in ("any", "tool"):
        forced = must_call(tools, choice.name if choice.type == "tool" else None)
    return tuple(tools), forced, tuple(notices)


def _turn(message: Message, where: str) -> list[dict[str, Any]]:
    """One turn as chat templates take it: tool results are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        if isinstance(block, MediaBlock):
            raise _no_media(block, f"{where}.content.{i}")
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = history_arguments(block.input, f"{where}.tool_use.input")
            call = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": call})
        elif isinstance(block, ToolResultBlock):
            results.append(_result(block, f"{where}.content.{i}.tool_result"))
    if (calls or reasoning) and message.role != "assistant":
        raise Refusal(f"{where}: tool_use and thinking are for assistant turns only.", param=where)
    if results and message.role != "user":
        raise Refusal(f"{where}: tool_result is for user turns only.", param=where)
    turn: dict[str, Any] = {"role": message.role, "content": joined_text(texts)}
    if reasoning:
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    if results:
        return [*results, turn] if texts else results
    return [turn]


def _no_media(block: MediaBlock, where: str) -> Refusal:
    """The refusal in the API's own words for its place, by which clients take the block out."""
    where = f"{where}.{block.type}"
    return Refusal(f"{where}: this server takes text only. Leave it out.", param=where)


def _result(block: ToolResultBlock, where: str) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        texts: list[str] = []
        for i, part in enumerate(content):
            if isinstance(part, MediaBlock):
                raise _no_media(part, f"{where}.content.{i}")
            texts.append(part.text)
        content = joined_text(texts)
    if block.is_error:
        content = f"Error: {content}"
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
