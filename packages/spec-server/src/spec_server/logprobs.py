"""Log-probabilities in the shapes of the OpenAI dialect, lined up with the text they belong to."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

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
        self._waiting: deque[tuple[int, int, TokenInfo]] = deque()  # begin and end in the answer

    def add(self, tokens: Sequence[TokenInfo]) -> None:
        """The next tokens of the answer; one with part of a character stands where that does."""
        for token in tokens:
            if token.logprob is None or self._words.is_hidden(token.id):
                continue
            start = self._n_chars
            self._n_chars += len(self._letters.decode(bytes(self._words.token_bytes(token.id))))
            self._waiting.append((start, max(self._n_chars, start + 1), token))

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


def legacy_entries(
    tokens: Sequence[TokenInfo], words: Words, offset: int, n_top: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of /v1/completions, and the offset after these tokens."""
    texts = [words.token_text(token.id) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        # Of tokens with one text, such as parts of characters, the likeliest is told.
        {words.token_text(i): lp for i, lp in reversed(token.top)}
        if token.logprob is not None
        else None
        for token in tokens
    ]
    entries = {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if n_top else None,
        "text_offset": offsets,
    }
    return entries, offset
