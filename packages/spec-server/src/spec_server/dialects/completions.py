"""Answers of /v1/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from spec_server.dialects.common import openai_usage, sse, x_spec
from spec_server.errors import body_of
from spec_server.exchange import Broken, Exchange
from spec_server.jobs import End, Figures, Piece, Scored, TokenInfo
from spec_server.logprobs import legacy_entries
from spec_server.schema.base import Wish
from spec_server.words import Words


class CompletionAnswer:
    """All choices of one completion.

    Args:
        exchange: The generations, one per choice.
        wish: The request.
        model: The model's name.
        words: For the texts of tokens.
        include_usage: Send usage at the end of a stream.
        echoes: What each answer begins with; empty for nothing.
    """

    def __init__(
        self,
        exchange: Exchange,
        wish: Wish,
        model: str,
        words: Words,
        include_usage: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._exchange = exchange
        self._wish = wish
        self._words = words
        self._include_usage = include_usage
        self._base = {
            "id": f"cmpl-{exchange.id}",
            "object": "text_completion",
            "created": exchange.created,
            "model": model,
            "system_fingerprint": None,
        }
        self._ends: dict[int, End] = {}
        n = len(exchange.asks)
        self._offsets = [0] * n
        self._echoes = list(echoes) or [""] * n  # not sent yet

    async def whole(self) -> dict[str, Any]:
        """The finished completion."""
        n = len(self._exchange.asks)
        texts, tokens = [""] * n, [list[TokenInfo]() for _ in range(n)]
        async for item in self._exchange.events():
            if item is None:
                continue
            index, event = item
            if isinstance(event, Piece | Scored):
                texts[index] += self._text(index, event)
                tokens[index] += event.tokens
            elif isinstance(event, End):
                self._ends[index] = event
        choices = [self._choice(i, texts[i], tokens[i], self._ends[i].reason) for i in range(n)]
        return {**self._base, "choices": choices, "usage": self._usage(), "x_spec": self._told()}

    async def stream(self, silence_s: float) -> AsyncIterator[bytes]:
        """Chunks, then `[DONE]`."""
        try:
            async for item in self._exchange.events(silence_s):
                if item is None:
                    yield self._chunk(0, "", [], None)
                    continue
                index, event = item
                if isinstance(event, Piece | Scored):
                    text = self._text(index, event)
                    if text or self._wish.top_logprobs is not None:
                        yield self._chunk(index, text, list(event.tokens), None)
                elif isinstance(event, End):
                    self._ends[index] = event
                    yield self._chunk(index, "", [], event.reason)
        except Broken as broken:
            yield sse(body_of(broken.as_refusal(), "openai"))
            return
        last: dict[str, Any] = {**self._base, "choices": [], "x_spec": self._told()}
        if self._include_usage:
            yield sse({**last, "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _text(self, index: int, event: Piece | Scored) -> str:
        """The text of an event, the prompt in front of the first one."""
        echo, self._echoes[index] = self._echoes[index], ""
        return echo + (event.text if isinstance(event, Piece) else "")

    def _chunk(self, index: int, text: str, tokens: list[TokenInfo], reason: str | None) -> bytes:
        extra = {}
        if reason is not None and not self._include_usage and index == 0:
            extra["x_spec"] = x_spec(self._ends[index].figures)
        return sse({**self._base, "choices": [self._choice(index, text, tokens, reason)], **extra})

    def _choice(
        self, index: int, text: str, tokens: list[TokenInfo], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        n_top = self._wish.top_logprobs
        if n_top is not None and tokens:
            logprobs, self._offsets[index] = legacy_entries(
                tokens, self._words, self._offsets[index], n_top
            )
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _figures(self) -> list[Figures]:
        return [self._ends[i].figures for i in sorted(self._ends)]

    def _usage(self) -> dict[str, Any]:
        figures, n = self._figures(), self._wish.n
        usage = openai_usage(figures)
        prompts = sum(f.prompt_tokens for f in figures[::n])
        usage["prompt_tokens"] = prompts
        usage["total_tokens"] = prompts + usage["completion_tokens"]
        return usage

    def _told(self) -> dict[str, Any]:
        return x_spec(self._figures()[0], self._wish.notices)
