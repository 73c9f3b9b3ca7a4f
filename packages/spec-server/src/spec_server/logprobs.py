"""Log-probabilities in the shapes of the OpenAI dialect, lined up with the text they belong to."""

from collections.abc import Sequence
from typing import Any

from spec_server.answer import Marks
from spec_server.jobs import TokenInfo
from spec_server.words import Words


class TextTokens:
    """Picks the tokens of the visible text: reasoning, calls and their marks are left out.

    Args:
        words: Encodes the marks.
        marks: The answer's marks.
    """

    def __init__(self, words: Words, marks: Marks) -> None:
        self._think_start, self._think_end = _single(words, marks.think)
        self._call_start, self._call_end = _single(words, marks.call)
        self._in_reasoning, self._in_call = marks.in_reasoning, False
        self._begun = False

    def pick(self, tokens: Sequence[TokenInfo]) -> list[TokenInfo]:
        """The tokens of these that belong to the text."""
        return [token for token in tokens if self._keeps(token.id)]

    def _keeps(self, token: int) -> bool:
        if self._in_reasoning:
            self._in_reasoning = token != self._think_end
            return False
        if not self._begun and token == self._think_start:
            self._in_reasoning = True
            return False
        self._begun = True
        if self._in_call:
            self._in_call = token != self._call_end
            return False
        if token == self._call_start:
            self._in_call = True
            return False
        return True


def _single(words: Words, pair: tuple[str, str] | None) -> tuple[int, int]:
    """First id of the opening mark and last id of the closing one; -1 for none."""
    if pair is None:
        return -1, -1
    start, end = (words.encode_bare(mark) if mark else [] for mark in pair)
    return (start[0] if start else -1), (end[-1] if end else -1)


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
