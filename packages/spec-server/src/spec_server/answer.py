"""Splits an answer as it streams: reasoning, text, tool calls.

The same splitter serves streamed and whole answers, so both always agree. Text is held back while
it may still turn into a mark. A call inside the reasoning stays reasoning; a mark inside quoted
code stays text; an end mark inside a string of a call's JSON is part of it; a call whose opening
mark is missing is one where the answer begins with it. Knows nothing about dialects.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["reasoning", "text", "call"]
ParseCall = Callable[[str], "list[ToolCall] | None"]
_log = logging.getLogger("spec_server")
_BODIES = ("{", "<function=")  # how a call begins whose opening mark is missing
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"?'  # of JSON; it may be cut


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made.

    Attributes:
        name: The tool.
        arguments: A JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer that is final.

    Attributes:
        kind: What it is.
        text: Of reasoning or text.
        call: The call.
        at: Where a text begins in the answer, in characters.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    at: int = 0


@dataclass(frozen=True, slots=True)
class Marks:
    """How a model marks the parts of its answer.

    Attributes:
        think: Start and end of the reasoning; None for a model without.
        call: Start and end of a tool call; the end may be empty (up to the answer's end). None when
            no tools were offered, or for a model without.
        in_reasoning: The prompt already opened the reasoning.
        bare: Calls have no marks: an answer that is one JSON object may be a call.
        harmony: The answer comes in channels; `Harmony` splits it.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    in_reasoning: bool = False
    bare: bool = False
    harmony: bool = False


class Splitter:
    """One answer.

    Args:
        marks: The model's marks.
        parse: The body of a call to the calls it makes; None when it is not a call.
        parse_bare: The same for a call without its opening mark, at the beginning of the text.
    """

    def __init__(
        self, marks: Marks, parse: ParseCall | None = None, parse_bare: ParseCall | None = None
    ) -> None:
        self._think, self._call = marks.think, marks.call if parse is not None else None
        self._parse, self._parse_bare = parse, parse_bare if self._call or marks.bare else None
        self._state: Literal["start", "reasoning", "text", "call", "bare"] = "start"
        if marks.in_reasoning and self._think:
            self._state = "reasoning"
        self._held = ""
        self._n_seen = 0  # characters of the answer; what is held are the last ones
        self._blank = True  # nothing but white space in the reasoning so far
        self._after_reasoning = False
        self._code = _Code()
        self._space = ""  # white space before the mark of the call being gathered
        self._n_searched = 0  # characters of the call being gathered that hold no end of it
        self._ended = False
        self._warned = False
        self._after_call = False  # white space that follows is no part of the text
        self.n_reasoned = 0  # characters of the answer up to the end of its reasoning

    def push(self, text: str) -> list[Part]:
        """Add text; returns the parts that became final."""
        self._held += text
        self._n_seen += len(text)
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The answer has ended; returns what was held back."""
        self._ended = True
        parts = self.push("")
        rest, self._held = self._held, ""
        if self._state == "call" and self._call is not None:
            calls = self._parse(rest) if self._parse is not None else None
            text = self._space + self._call[0] + rest
            parts += self._calls(calls) if calls else self._text(text)
        elif self._state == "bare":
            calls = self._parse_bare(rest) if self._parse_bare is not None else None
            parts += self._calls(calls) if calls else self._text(rest)
        elif self._state == "reasoning":
            self.n_reasoned = self._n_seen
            parts += [Part("reasoning", rest)] if rest else []
        elif self._state == "text" or not self._after_reasoning:
            parts += self._text(rest)
        return parts

    # -- one step of the machine; True when there may be another one -------------------------------

    def _advance(self, parts: list[Part]) -> bool:
        if self._state == "start":
            return self._begin()
        if self._state == "reasoning":
            return self._reason(parts)
        if self._state == "text":
            return self._speak(parts)
        if self._state == "call":
            return self._gather(parts)
        return self._gather_bare(parts)

    def _begin(self) -> bool:
        """Before the first visible character: reasoning, a bare call, or text."""
        seen = self._held.lstrip()
        if not seen:
            return False
        if self._think is not None:
            start = self._think[0]
            if seen.startswith(start):
                self._held = seen[len(start) :]
                self._state, self._blank = "reasoning", True
                return True
            if start.startswith(seen):
                return False
        bare = False
        if self._parse_bare is not None:
            bare = seen.startswith(_BODIES)
            if not bare and any(body.startswith(seen) for body in _BODIES):
                return False
        if self._after_reasoning:
            self._held = seen
        self._state = "bare" if bare else "text"
        return True

    def _reason(self, parts: list[Part]) -> bool:
        assert self._think is not None
        at = self._held.find(self._think[1])
        text = self._held[:at] if at >= 0 else self._cut(self._think[1])
        if at >= 0:
            self._held = self._held[at + len(self._think[1]) :]
            self.n_reasoned = self._n_seen - len(self._held)
            self._state, self._after_reasoning = "start", True
            self._think = None  # a second block is text
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            parts.append(Part("reasoning", text))
        return at >= 0

    def _speak(self, parts: list[Part]) -> bool:
        if self._call is None:
            text, self._held = self._held, ""
            parts += self._text(text)
            return False
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        start, end = self._call
        at = self._held.find(start)
        if at < 0:
            if end and end in self._held and not self._warned:
                self._warned = True
                _log.warning(
                    '[tools] The answer holds "%s" without "%s"; it stays text.', end, start
                )
            text = self._cut(start, end)
            body = text.rstrip()  # white space before a call is no part of the text
            self._held = text[len(body) :] + self._held
            parts += self._text(body)
            return False
        before = self._held[:at]
        if self._quoted(before):
            self._held = self._held[at + len(start) :]
            parts += self._text(before + start)
            return True
        self._held = self._held[at + len(start) :]
        body = before.rstrip()
        self._space = before[len(body) :]
        parts += self._text(body, behind=len(self._space) + len(start))
        self._state = "call"
        return True

    def _gather(self, parts: list[Part]) -> bool:
        assert self._call is not None and self._parse is not None
        start, end = self._call
        first = self._held.find(end) if end else -1
        if first < 0:
            return False
        at = self._end_of_call(end)
        if at < 0 and not self._ended:
            return False
        body = self._held if at < 0 else self._held[:at]
        calls = self._parse(body)
        if not calls and at != first:  # it was no JSON, so that nothing in it was a string
            body = self._held[:first]
            calls = self._parse(body)
        self._held = self._held[len(body) + len(end) :]
        self._state, self._n_searched = "text", 0
        if calls:
            parts += self._calls(calls)
            self._after_call = True
        else:
            parts += self._text(self._space + start + body + end)
        return True

    def _end_of_call(self, end: str) -> int:
        """Where the call being gathered ends: no string of JSON holds the mark. -1: not yet."""
        if not self._held.lstrip().startswith("{"):
            return self._held.find(end)
        if self._held.find(end, self._n_searched) >= 0:
            for found in re.finditer(f"{_STRING}|{re.escape(end)}", self._held, re.DOTALL):
                if found[0] == end:
                    return found.start()
            self._n_searched = self._held.rfind(end) + len(end)
        return -1

    def _gather_bare(self, parts: list[Part]) -> bool:
        """What may be a call without its opening mark, up to the next mark or the end."""
        if self._call is None:
            return False
        places = [(self._held.find(mark), mark) for mark in self._call if mark]
        at, mark = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if at < 0:
            return False
        calls = self._parse_bare(self._held[:at]) if self._parse_bare is not None else None
        self._state = "text"
        if calls:
            parts += self._calls(calls)
            self._held = self._held[at + (len(mark) if mark == self._call[1] else 0) :]
            self._after_call = True
        return True

    # -- helpers ---------------------------------------------------------------------------------

    def _cut(self, *marks: str) -> str:
        """Take what is held, but for an end that may be the beginning of a mark."""
        held = self._held
        for n in range(min(len(held), max(map(len, marks)) - 1), 0, -1):
            if any(len(mark) > n and held.endswith(mark[:n]) for mark in marks):
                self._held = held[-n:]
                return held[:-n]
        self._held = ""
        return held

    def _text(self, text: str, *, behind: int = 0) -> list[Part]:
        """Final text that ends so many characters before what is held."""
        if not text:
            return []
        self._code.feed(text)
        return [Part("text", text, at=self._n_seen - len(self._held) - behind - len(text))]

    def _calls(self, calls: list[ToolCall]) -> list[Part]:
        return [Part("call", call=call) for call in calls]

    def _quoted(self, before: str) -> bool:
        """Whether a mark that follows `before` is inside quoted code."""
        code = replace(self._code)
        code.feed(before)
        code.close_run()
        return code.fenced or code.inline


@dataclass(slots=True)
class _Code:
    """Whether a text ends inside back-ticks: a fence, or code within one line."""

    fenced: bool = False
    inline: bool = False
    run: int = 0  # back-ticks just seen

    def feed(self, text: str) -> None:
        for letter in text:
            if letter == "`":
                self.run += 1
                continue
            self.close_run()
            if letter == "\n":
                self.inline = False

    def close_run(self) -> None:
        if self.run >= 3:
            self.fenced = not self.fenced
        elif self.run and not self.fenced:
            self.inline = not self.inline
        self.run = 0
