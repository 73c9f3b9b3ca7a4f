"""Log-probabilities in the shapes of the OpenAI dialect, lined up with the text they belong to."""

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from spec_core.text import TextStream
from spec_server.answer import Part
from spec_server.jobs import TokenInfo
from spec_server.words import Words


class TextTokens:
    """Picks the tokens of the visible text: reasoning, calls and their marks are left out.

    Args:
        words: Of the answer, its marks kept.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0
        self._starts: list[int] = []  # of all tokens that have text
        self._waiting: deque[tuple[int, int, TokenInfo]] = deque()  # begin and end in the answer

    def add(self, tokens: Sequence[TokenInfo]) -> None:
        """The next tokens of the answer; one with part of a character stands where that does."""
        for token in tokens:
            if self._words.is_hidden(token.id):
                continue
            start = self._n_chars
            self._starts.append(start)
            self._n_chars += len(self._letters.decode(bytes(self._words.token_bytes(token.id))))
            if token.logprob is not None:
                self._waiting.append((start, max(self._n_chars, start + 1), token))

    def n_before(self, place: int) -> int:
        """How many tokens begin before a place in the answer, in characters."""
        return bisect_left(self._starts, place)

    def pick(self, parts: Sequence[Part]) -> list[TokenInfo]:
        """The tokens of these parts' text."""
        picked = []
        for part in parts:
            while part.kind == "text" and self._waiting:
                start, end, token = self._waiting[0]
                if start >= part.at + len(part.text):
                    break
                self._waiting.popleft()
                if end > part.at:
                    picked.append(token)
        return picked


def chat_entries(tokens: Sequence[TokenInfo], words: Words) -> list[dict[str, Any]]:
    """Entries of `choices[].logprobs.content`."""
    return [
        {
            "token": words.token_text(token.id),
            "logprob": token.logprob,
            "bytes": words.token_bytes(token.id),
            "top_logprobs": [
                {
                    "token": words.token_text(other),
                    "logprob": logprob,
                    "bytes": words.token_bytes(other),
                }
                for other, logprob in token.top
            ],
        }
        for token in tokens
    ]


class TextPlaces:
    """Where the tokens of one answer begin in its text.

    Args:
        words: Of the model.
        prompt: Ids before the answer.
        echo: What the text begins with.
    """

    def __init__(self, words: Words, prompt: Sequence[int], echo: str) -> None:
        self._words = words
        self._prompt = prompt
        self._echo = echo
        self._stream = TextStream(words.decode, (), prompt[-4:])
        self._n = len(echo)

    def echoed(self) -> list[int]:
        """Offsets of the prompt's tokens; a start token that the text lacks takes no room."""
        stream, n, offsets = TextStream(self._words.decode_all), 0, list[int]()
        for i, token in enumerate(self._prompt):
            added = i == 0 and token == self._words.hf.bos_token_id
            if added and not self._echo.startswith(self._words.decode_all([token])):
                offsets.append(0)
                continue
            at, n = self._place(token, stream.push(token), n)
            offsets.append(min(at, len(self._echo)))
        return offsets

    def next(self, tokens: Sequence[TokenInfo]) -> list[int]:
        """Offsets of the answer's next tokens."""
        offsets: list[int] = []
        for token in tokens:
            at, self._n = self._place(token.id, self._stream.push(token.id), self._n)
            offsets.append(at)
        return offsets

    def _place(self, token: int, added: str, n: int) -> tuple[int, int]:
        """Where a token begins that made `added` final after n characters, and where it ends."""
        own, end = self._words.token_text(token), n + len(added)
        # Bytes before it that turned out to be no character became final with it.
        return (end - len(own) if own and added.endswith(own) else n), end


def legacy_entries(
    tokens: Sequence[TokenInfo], offsets: Sequence[int], words: Words, n_top: int
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions."""
    tops = [
        # Of tokens with one text, such as parts of characters, the likeliest is told.
        {words.token_text(i): lp for i, lp in reversed(token.top)}
        if token.logprob is not None
        else None
        for token in tokens
    ]
    return {
        "tokens": [words.token_text(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if n_top else None,
        "text_offset": list(offsets),
    }
