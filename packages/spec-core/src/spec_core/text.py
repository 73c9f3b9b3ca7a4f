"""Ids to text as they arrive: no half characters, no part of a stop string. Knows no tokenizer.

A token may hold part of a character, and a stop string may span tokens, so text is held back until
it can no longer change or turn into a stop string.
"""

from collections.abc import Callable, Sequence

_MOST_CONTEXT = 8  # ids decoded again with each new one
_MOST_BYTES = 4  # of a character in UTF-8; an id stands for one or more
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces.

    Args:
        strings: Non-empty, or one alone.

    Attributes:
        found: The string that ended the text, or None.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(self._strings):
            raise ValueError("[stop] A stop string must have at least one character, got ''.")
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is final of it: part of no stop string, and before the first."""
        text = self._held + text
        found = [(at, stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            self._held = ""
            return text[:at]
        cut = len(text) - max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What is still held back, after the last text."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Decodes one answer token by token and looks for stop strings.

    Args:
        decode: Ids to text; a character cut in half appears as U+FFFD.
        stop_strings: Non-empty strings that end the text, or one alone; the text is cut just before
            the first. Or what looks for them, for this stream alone.
        prompt_tail: Ids just before the answer, so that a tokenizer that treats the first token of
            a text differently (a leading space) sees the answer in its place.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] | StopStrings = (),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        if not isinstance(stop_strings, StopStrings):
            stop_strings = StopStrings(stop_strings)
        self._decode = decode
        self._stops = stop_strings
        self._ids = list(prompt_tail)
        self._start = 0  # decode from here: enough context to render the newest tokens
        self._read = len(self._ids)  # text of the ids before this one has been taken
        self._known: str | None = None  # that text, from _start on, where it is at hand

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    @property
    def stopped(self) -> bool:
        """True once one did."""
        return self._stops.found is not None

    def push(self, token: int) -> str:
        """Add one token; returns text that became final. Sets `stopped` at a stop string."""
        self._ids.append(token)
        text = self._new_text()
        return self._stops.push(text) if text else ""

    def finish(self) -> str:
        """The text still held back, after the last token; a half character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._stops.push(self._new_text(final=True))
        return text if self.stopped else text + self._stops.finish()

    def _new_text(self, *, final: bool = False) -> str:
        if self._known is None:
            self._known = self._decode(self._ids[self._start : self._read])
        before = self._known
        now = self._decode(self._ids[self._start :])
        if now.endswith(_PARTIAL) and not final:
            return self._broken_text(before, now)
        if len(now) < len(before):
            return ""
        self._known = now
        if len(self._ids) - self._start > _MOST_CONTEXT:
            self._start, self._known = self._read, None
        self._read = len(self._ids)
        return now[len(before) :]

    def _broken_text(self, before: str, now: str) -> str:
        """What became final of a text that ends in bytes which are no character, or not yet."""
        if len(self._ids) - self._read <= _MOST_BYTES:
            return ""
        self._start = max(self._start, len(self._ids) - _MOST_CONTEXT)
        self._read = len(self._ids)
        tail, new = self._decode(self._ids[self._start :]), now[len(before) :]
        n_held = min(*(len(t) - len(t.rstrip(_PARTIAL)) for t in (tail, new)), _MOST_BYTES - 1)
        self._known = tail[: len(tail) - n_held]
        return new[: len(new) - n_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
