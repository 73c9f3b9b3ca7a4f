"""What a client is told when a request is refused or breaks off, in each dialect's own shape."""

from typing import Any, Literal

Dialect = Literal["openai", "anthropic"]

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class Refusal(Exception):
    """A request that is not served.

    Args:
        message: What must hold, and what was given.
        status: HTTP status.
        param: Name of the field at fault.
        code: OpenAI's machine-readable code.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code


class PromptTooLong(Refusal):
    """The prompt does not fit the model's context; each dialect has its own words for it.

    Args:
        n_prompt: Tokens of the prompt.
        n_context: Tokens of the context.
    """

    def __init__(self, n_prompt: int, n_context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {n_context} tokens. However, your messages "
            f"resulted in {n_prompt} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.anthropic = f"prompt is too long: {n_prompt} tokens > {n_context - 1} maximum"


def dialect_of(path: str) -> Dialect:
    """The dialect spoken at a path."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def body_of(refusal: Refusal, dialect: Dialect) -> dict[str, Any]:
    """The JSON body that tells a client about a refusal."""
    if dialect == "anthropic":
        message = refusal.anthropic if isinstance(refusal, PromptTooLong) else refusal.message
        kind = _ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(refusal.status, "invalid_request_error")
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }
