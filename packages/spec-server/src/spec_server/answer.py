"""Splits an answer as it streams: reasoning, text, tool calls.

The same splitter serves streamed and whole answers, so both always agree. Text is held back while
it may still turn into a mark. A call inside the reasoning stays reasoning; a mark inside quoted
code stays text; an end mark inside a string of a call's JSON is part of it; a call whose opening
mark is missing is one where the answer begins with it. What is held back is searched once, however
many pieces it comes in. Knows nothing about dialects.
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
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # of JSON
_SPACE = re.compile(r"\s*")
_MOST_MISREAD = 8  # calls of an answer that are read again up to their first end mark


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
        self._space = ""  # white space before what is held: no part of the text if a call follows
        self._n_searched = 0  # characters of what is held that were looked at in vain
        self._end_of_call: _EndOfCall | None = None  # of the call being gathered
        self._n_misread = 0
        self._ended = False
        self._warned = False
        self._after_call = False  # white space that follows is no part of the text
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
            parts += self._text(self._space + rest)
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
        self._n_searched = end_of_space(self._held, self._n_searched)
        seen = self._held[self._n_searched :]
        if not seen:
            return False
        if self._think is not None:
            start = self._think[0]
            if seen.startswith(start):
                self._held, self._n_searched = seen[len(start) :], 0
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
        self._n_searched = 0
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
            body = text.rstrip()
            space, self._space = self._space, ""
            if body:
                parts += self._text(space + body, behind=len(text) - len(body))
                space = ""
            space += text[len(body) :]
            self._space = space
            return False
        before, self._space = self._space + self._held[:at], ""
        self._held = self._held[at + len(start) :]
        if self._quoted(before):
            parts += self._text(before + start)
            return True
        body = before.rstrip()
        self._space = before[len(body) :]
        parts += self._text(body, behind=len(self._space) + len(start))
        self._state = "call"
        return True

    def _gather(self, parts: list[Part]) -> bool:
        assert self._call is not None and self._parse is not None
        start, end = self._call
        if not end:
            return False
        if self._end_of_call is None:
            self._end_of_call = _EndOfCall(end, json=self._n_misread < _MOST_MISREAD)
        at = self._end_of_call.find(self._held)
        if at < 0 and not self._ended:
            return False
        first = self._held.find(end)
        if first < 0:
            return False
        body = self._held if at < 0 else self._held[:at]
        calls = self._parse(body)
        if not calls and at != first:  # it was no JSON, so that nothing in it was a string
            self._n_misread += 1
            body = self._held[:first]
            calls = self._parse(body)
        self._held = self._held[len(body) + len(end) :]
        self._state, self._end_of_call = "text", None
        space, self._space = self._space, ""
        if calls:
            parts += self._calls(calls)
            self._after_call = True
        else:
            parts += self._text(space + start + body + end)
        return True

    def _gather_bare(self, parts: list[Part]) -> bool:
        """What may be a call without its opening mark, up to the next mark or the end."""
        if self._call is None:
            return False
        marks = [mark for mark in self._call if mark]
        places = [(self._held.find(mark, self._n_searched), mark) for mark in marks]
        at, mark = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if at < 0:
            self._n_searched = max(0, len(self._held) - max(map(len, marks)) + 1)
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


class _EndOfCall:
    """Where the call being gathered ends: no string of JSON holds the mark.

    Args:
        end: The mark.
        json: The call may be JSON, which it is if it begins with a brace.
    """

    def __init__(self, end: str, *, json: bool) -> None:
        self._end = end
        self._json = json
        self._stop: re.Pattern[str] | None = None  # the mark, or what opens a string
        self._in_string = False
        self._n_searched = 0

    def find(self, held: str) -> int:
        """The place in a call that has grown since the last time; -1: not yet."""
        if self._stop is None:
            self._n_searched = end_of_space(held, self._n_searched)
            if self._n_searched == len(held):
                return -1
            strings = self._json and held[self._n_searched] == "{"
            self._stop = re.compile(('"|' if strings else "") + re.escape(self._end))
        while not self._in_string or self._leave_string(held):
            found = self._stop.search(held, self._n_searched)
            if found is None:
                self._n_searched = max(self._n_searched, len(held) - len(self._end) + 1)
                return -1
            if found[0] == self._end:
                return found.start()
            self._n_searched, self._in_string = found.end(), True
        return -1

    def _leave_string(self, held: str) -> bool:
        """Go on behind the string that was open; False when it still is."""
        inside = _IN_STRING.match(held, self._n_searched)
        assert inside is not None
        self._n_searched = inside.end()
        self._in_string = held[self._n_searched : self._n_searched + 1] != '"'
        self._n_searched += not self._in_string
        return not self._in_string


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


def end_of_space(text: str, start: int) -> int:
    """Where white space ends that begins at a place, if only there."""
    space = _SPACE.match(text, start)
    return space.end() if space is not None else start
