"""Splits an answer in gpt-oss's format, where each message of it names its channel.

`<|channel|>analysis<|message|>` begins reasoning, `final` and `commentary` what the user reads, and
a header with `to=functions.NAME` the arguments of a call. Headers are no part of the answer, and no
stop string is looked for in them. Knows nothing about dialects.

References:
    OpenAI, the harmony response format: github.com/openai/harmony.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from spec_core.text import StopStrings
from spec_server.answer import Kind, ParseCall, Part, ToolCall, end_of_space

THINK = ("<|channel|>analysis<|message|>", "<|end|>")
CALL = ("<|channel|>commentary to=", "<|call|>")
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_MESSAGE = "<|message|>"
_OPENS = ("<|channel|>", "<|start|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_GAP = "\n\n"  # between two messages of a kind
_ANY = ToolCall("", "{}")
_FUNCTIONS = "functions."  # tools of the request, in whatever channel the model calls them
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w*)")


def parse_call(text: str, tools: Any = None) -> dict[str, Any]:
    """A call from its name, `<|message|>` and its arguments; as mlx-lm's parsers do it."""
    name, _, arguments = text.partition(_MESSAGE)
    return {"name": name, "arguments": json.loads(arguments) if arguments.strip() else {}}


class Harmony:
    """One answer, in place of a `Splitter`.

    Args:
        parse: A call by `parse_call`'s text; None when no tools were offered.
        in_reasoning: The prompt already opened the reasoning.
        gap: What is put between two messages of a kind.
    """

    def __init__(
        self, parse: ParseCall | None = None, *, in_reasoning: bool = False, gap: str = _GAP
    ) -> None:
        self._parse = parse
        self._gap = gap
        self._state: Literal["start", "header", "reasoning", "text", "call"] = "start"
        if in_reasoning:
            self._state = "reasoning"
        self._held = ""
        self._n_searched = 0  # characters of what is held that were looked at in vain
        self._n_seen = 0  # characters of the answer; what is held are the last ones
        self._name = ""  # of the call being gathered
        self._said: set[Kind] = set()
        self._ended: set[Kind] = set()  # said in messages that have ended: a gap comes before more
        self.n_reasoned = 0  # characters of the answer up to the end of its reasoning

    def push(self, text: str) -> list[Part]:
        """Add text; returns the parts that became final."""
        held, self._held = self._held, ""
        held += text  # in place, since nothing else refers to it
        self._held = held
        self._n_seen += len(text)
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The answer has ended; returns what was held back. A header alone says nothing."""
        parts = self.push("")
        if self._state == "header":
            return parts
        self._close(parts, len(self._held))
        return parts

    @property
    def n_held(self) -> int:
        """Characters of the answer that are not final."""
        return len(self._held)

    @property
    def in_text(self) -> bool:
        """Whether a message for the user is open."""
        return self._state == "text"

    # -- one step of the machine; True when there may be another one -------------------------------

    def _advance(self, parts: list[Part]) -> bool:
        if self._state == "start":
            return self._begin()
        return self._read_header() if self._state == "header" else self._read_body(parts)

    def _begin(self) -> bool:
        """Before a message: it begins with a header, or text without one is text."""
        self._n_searched = end_of_space(self._held, self._n_searched)
        if not self._held.startswith(_OPENS, self._n_searched):
            seen = self._held[self._n_searched :]
            if any(mark.startswith(seen) for mark in _OPENS):
                return False
            self._state = "text"
        else:
            self._state = "header"
        self._n_searched = 0
        return True

    def _read_header(self) -> bool:
        """Up to a body: who speaks to whom in which channel."""
        at = self._held.find(_MESSAGE, self._n_searched)
        if at < 0:
            self._n_searched = max(0, len(self._held) - len(_MESSAGE) + 1)
            return False
        self._n_searched = 0
        header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        reasons = channel is not None and channel[1] == "analysis"
        to = recipient[1] if recipient is not None else ""
        if to.startswith(_FUNCTIONS) or (
            to not in ("", "user", "all", "assistant") and not reasons
        ):
            self._state, self._name = "call", to.removeprefix(_FUNCTIONS)
        else:
            self._state = "reasoning" if reasons else "text"
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        """Up to the end of a message, or as far as it is known to be no mark."""
        end = _END.search(self._held, self._n_searched)
        if end is None:
            n_whole = len(self._held) - self._n_of_a_mark()
            if self._state == "call":
                self._n_searched = n_whole
            else:
                self._say(parts, n_whole)
            return False
        self._n_searched = 0
        self._close(parts, end.start())
        self._held = self._held[len(end[0]) if end[0] not in _OPENS else 0 :]
        self._state = "start"
        return True

    # -- helpers ---------------------------------------------------------------------------------

    def _close(self, parts: list[Part], n: int) -> None:
        """The message ends after n characters of what is held."""
        if self._state == "call" and self._parse is not None:
            calls = self._parse(f"{self._name}{_MESSAGE}{self._held[:n]}")
            if calls:
                self._held = self._held[n:]
                parts += [Part("call", call=call) for call in calls]
                return
        self._say(parts, n)
        self._ended |= self._said

    def _say(self, parts: list[Part], n: int) -> None:
        """The first n characters of what is held are final: reasoning, or text."""
        at = self._n_seen - len(self._held)
        text, self._held = self._held[:n], self._held[n:]
        if not text:
            return
        kind: Kind = "reasoning" if self._state == "reasoning" else "text"
        if kind == "reasoning":
            self.n_reasoned = at + len(text)
        gap = self._gap if kind in self._ended else ""
        self._ended.discard(kind)
        self._said.add(kind)
        # The gap is no part of the answer: apart, so that the text's place stays right.
        parts += [Part(kind, piece, at=at) for piece in (gap, text) if piece]

    def _n_of_a_mark(self) -> int:
        """Characters at the end of what is held that may be the beginning of a mark."""
        start = self._held.rfind("<", self._n_searched)
        tail = self._held[start:] if start >= 0 else ""
        return len(tail) if tail and any(mark.startswith(tail) for mark in _ENDS) else 0


class TextStops(StopStrings):
    """Stop strings that are looked for in what the user reads, each message by itself.

    Not in headers, reasoning and calls, which are handed on as they come.

    Args:
        strings: Non-empty.
        in_reasoning: The prompt already opened the reasoning.
    """

    def __init__(self, strings: Sequence[str], *, in_reasoning: bool = False) -> None:
        super().__init__(strings)
        self._splitter = Harmony(lambda call: [_ANY], in_reasoning=in_reasoning, gap="")
        self._rest = ""  # of the answer, not handed on yet
        self._n_seen = 0
        self._end = 0  # of the text that was looked through, in the answer

    def push(self, text: str) -> str:
        """Add a piece of the answer; returns what is final of it."""
        rest, self._rest = self._rest, ""
        rest += text  # in place
        self._rest = rest
        self._n_seen += len(text)
        return self._look(self._splitter.push(text))

    def finish(self) -> str:
        """What is still held back, up to a stop string."""
        final = self._look(self._splitter.finish())
        return final if self.found is not None else final + self._rest

    def _look(self, parts: list[Part]) -> str:
        for part in parts:
            if part.kind != "text":
                continue
            if part.at != self._end:
                self._held = ""
            start = part.at - len(self._held)
            n_final = start + len(super().push(part.text))
            if self.found is not None:
                return self._upto(n_final)
            self._end = part.at + len(part.text)
        if not self._splitter.in_text:
            self._held = ""
        n_known = self._n_seen - self._splitter.n_held
        return self._upto(self._end - len(self._held) if self._held else n_known)

    def _upto(self, place: int) -> str:
        n = place - (self._n_seen - len(self._rest))
        final, self._rest = self._rest[:n], self._rest[n:]
        return final
