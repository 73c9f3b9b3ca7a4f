"""What the request schemas share: strict types, unknown fields refused, one common result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)

from spec_core import Sampling
from spec_server.errors import Refusal
from spec_server.prompts import Chat

NO_REASONING = "This model does not reason apart, so the thinking asked for changes nothing."
NO_DEGREES = "This model's reasoning has no degrees, so the effort asked for changes nothing."
NO_VERBOSITY = "This model has no degrees of verbosity, so the one asked for changes nothing."
MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_ITEMS = 10_000  # messages, parts, tools

Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0)]
MinP = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Repetition = Annotated[float, Field(ge=0.01, le=100)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Limit = Annotated[int, Field(ge=1)]


def _texts(found: dict[str, Any]) -> dict[str, str]:
    wrong = next((key for key, value in found.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise ValueError(f'should hold text under "{wrong[:40]}"')
    return found


Texts = Annotated[dict[str, Any], AfterValidator(_texts)]


def _end_lists_early(schema: Any) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
        if schema.get("items_schema", {}).get("type") != "int":  # a prompt of ids is not limited
            schema["max_length"] = MOST_ITEMS
    for part in parts:
        if isinstance(part, dict | list | tuple):
            _end_lists_early(part)


class Strict(BaseModel):
    """No coercion, no unknown fields, no NaN; a field that is null counts as absent.

    The first thing that is wrong is told, and nothing is looked at behind it: a body of a million
    wrong items costs no more than one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Pydantic's own, but that lists end at the first wrong item."""
        schema = handler(source)
        _end_lists_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, data: Any) -> Any:
        """Clients send every field they know, unknown ones too, with null for "not given"."""
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in [key for key in given if key not in known][1:]:
            del given[key]
        return given


class Extension(Strict):
    """The server's own settings of a request."""

    max_draft: Annotated[int, Field(ge=0)] | None = None


class SchemaFormat(Strict):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request, free of any dialect: what `Ask` needs besides the prompt.

    Attributes:
        sampling: How to draw.
        max_tokens: Most tokens; None for the server's default.
        stop: Strings that end the text.
        n: Answers to the same prompt.
        stream: Send the answer as it comes.
        top_logprobs: Alternatives per token; None for no log-probabilities.
        echo: Begin the answer with the prompt; its log-probabilities too, where asked for.
        biases: Token id -> number added to its logit.
        reasoning_tokens: Most tokens of reasoning; None for no limit.
        hide_reasoning: Leave the text of the reasoning out of the answer.
        max_draft: Most drafts a round.
        by_token: Tell each token's text and origin.
        one_call: Report no more than one tool call.
        notices: What was left out, in words.
    """

    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    biases: tuple[tuple[int, float], ...] = ()
    reasoning_tokens: int | None = None
    hide_reasoning: bool = False
    max_draft: int | None = None
    by_token: bool = False
    one_call: bool = False
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatWish:
    """A chat request: the conversation, the wish, and what the answer repeats of it."""

    chat: Chat
    wish: Wish
    echo: dict[str, Any] = field(default_factory=dict)


def sampling_of(body: Any, default_temperature: float = 1.0) -> Sampling:
    """Sampling settings from the fields that a body has; absent ones take their defaults."""
    names = (
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    )
    given = {name: getattr(body, name, None) for name in names}
    temperature = default_temperature if body.temperature is None else body.temperature
    try:
        return Sampling(temperature, **{k: v for k, v in given.items() if v is not None})
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from None


def stops_of(stop: str | list[str] | None, param: str, most: int = 16) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        Refusal: one is empty, or there are too many.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not s for s in stops):
        raise Refusal(f'"{param}" must hold strings of at least one character.', param=param)
    if len(stops) > most:
        raise Refusal(f'"{param}" must hold at most {most} strings, got {len(stops)}.', param=param)
    return stops


def biases_of(logit_bias: dict[str, Any] | None) -> tuple[tuple[int, float], ...]:
    """Token biases by id.

    Raises:
        Refusal: a key is no id, or a bias is outside -100..100.
    """
    result = []
    for key, value in (logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
            raise Refusal(
                f'"logit_bias" must have token ids as keys, got "{key[:40]}".', param="logit_bias"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -100 <= value <= 100:
            shown = f"{value!r}"[:40]
            raise Refusal(
                f'"logit_bias" must hold numbers in -100..100, got {shown}.', param="logit_bias"
            )
        result.append((int(key), float(value)))
    return tuple(result)


def must_call(
    tools: Sequence[dict[str, Any]], name: str | None = None, *, param: str = "tool_choice"
) -> tuple[str, ...]:
    """The tools of which one must be called: the named one, or any.

    Raises:
        Refusal: there is none, or none of that name.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names:
        raise Refusal(f'"{param}" needs "tools".', param=param)
    if name is not None and name not in names:
        raise Refusal(
            f'"{param}" must name a tool of the request, got "{name}". It has {", ".join(names)}.',
            param=param,
        )
    return names if name is None else (name,)


def joined_text(parts: Sequence[str]) -> str:
    """The text of a message that came in parts."""
    return "".join(parts)
