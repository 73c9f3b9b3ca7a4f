"""What the endpoints share: splitting answers as they come, server-sent events, figures."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from spec_server.answer import Marks, Part, Splitter
from spec_server.harmony import Harmony, parse_call
from spec_server.jobs import End, Figures, Piece
from spec_server.logprobs import TextTokens
from spec_server.prompts import Prompter
from spec_server.tools import bare_parser, call_parser

_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}  # of str.splitlines alone


class Reply:
    """One answer being put together.

    Args:
        prompter: Of the model.
        marks: How the answer is split.
        tools: The tools of the request.
        one_call: Drop calls after the first.
    """

    def __init__(
        self,
        prompter: Prompter,
        marks: Marks,
        tools: Sequence[dict[str, Any]] = (),
        one_call: bool = False,
    ) -> None:
        parse = bare = None
        self._splitter: Splitter | Harmony
        if tools and not marks.harmony:
            bare = bare_parser(tools, prompter.wrapper.tool_parser)
        parser = parse_call if marks.harmony else prompter.wrapper.tool_parser
        if tools and parser is not None:
            parse = call_parser(parser, tools)
        if marks.harmony:
            self._splitter = Harmony(parse, in_reasoning=marks.in_reasoning)
        else:
            self._splitter = Splitter(marks, parse, bare)
        self._tokens = TextTokens(prompter.words)
        self._one_call = one_call
        self._n_calls = 0
        self.logprobs: list[Any] = []  # of text tokens, not handed out yet
        self.end: End | None = None

    def take(self, event: Piece | End) -> list[Part]:
        """The parts that became final with an event."""
        if isinstance(event, End):
            self.end = event
            parts = self._splitter.finish()
        else:
            self._tokens.add(event.tokens)
            parts = self._splitter.push(event.text)
        self.logprobs += self._tokens.pick(parts)
        return self._limited(parts)

    @property
    def made_call(self) -> bool:
        """True when the answer ended of itself after a call."""
        return self._n_calls > 0 and self.end is not None and self.end.reason == "stop"

    @property
    def n_reasoning(self) -> int:
        """Tokens up to the end of the reasoning, its marks included."""
        return self._tokens.n_before(self._splitter.n_reasoned)

    def _limited(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if part.kind == "call":
                self._n_calls += 1
                if self._one_call and self._n_calls > 1:
                    continue
            kept.append(part)
        return kept


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event; what some clients take for the end of a line is escaped."""
    head = f"event: {event}\n" if event is not None else ""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return f"{head}data: {text}\n\n".encode()


def new_id(prefix: str) -> str:
    """A fresh id."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def x_spec(figures: Figures, notices: Sequence[str] = ()) -> dict[str, Any]:
    """What each response says about how it was made."""
    told = figures.as_json()
    if notices or figures.notices:
        told["notices"] = [*notices, *figures.notices]
    return told


def openai_usage(figures: Sequence[Figures]) -> dict[str, Any]:
    """Usage over all choices; choices of one prompt count it once each time it was forwarded."""
    prompt = max(f.prompt_tokens for f in figures)
    completion = sum(f.completion_tokens for f in figures)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(f.cached_tokens for f in figures)},
    }
