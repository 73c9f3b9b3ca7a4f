"""Answers of /v1/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from spec_server.dialects.common import openai_usage, sse, x_spec
from spec_server.errors import body_of
from spec_server.exchange import Broken, Exchange
from spec_server.jobs import End, Figures, Piece, Scored, TokenInfo
from spec_server.logprobs import TextPlaces, legacy_entries
from spec_server.schema.base import Wish
from spec_server.words import Words


class CompletionAnswer:
    """All choices of one completion.

    Args:
        exchange: The generations, one per choice.
        wish: The request.
        model: The model's name.
        words: For the texts of tokens.
        include_usage: Send usage at the end of a stream, and null before.
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
        self._base: dict[str, Any] = {
            "id": f"cmpl-{exchange.id}",
            "object": "text_completion",
            "created": exchange.created,
            "model": model,
            "system_fingerprint": None,
        }
        if include_usage:
            self._base["usage"] = None
        self._ends: dict[int, End] = {}
        echoes = list(echoes) or [""] * len(exchange.asks)
        self._choices = [
            _Choice(words, ask.prompt, echo, wish.top_logprobs)
            for ask, echo in zip(exchange.asks, echoes, strict=True)
        ]

    async def whole(self) -> dict[str, Any]:
        """The finished completion."""
        texts: list[list[str]] = [[] for _ in self._choices]
        async for item in self._exchange.events():
            if item is not None and isinstance(item[1], Piece | Scored | End):
                texts[item[0]].append(self._take(*item))
        choices = [
            self._choice(i, "".join(own), self._ends[i].reason) for i, own in enumerate(texts)
        ]
        return {**self._base, "choices": choices, "usage": self._usage(), "x_spec": self._told()}

    async def stream(self, silence_s: float) -> AsyncIterator[bytes]:
        """Chunks, then `[DONE]`."""
        try:
            async for item in self._exchange.events(silence_s):
                if item is None:
                    waiting = next(i for i in range(len(self._choices)) if i not in self._ends)
                    yield self._chunk(waiting, "", None)
                    continue
                index, event = item
                if not isinstance(event, Piece | Scored | End):
                    continue
                text = self._take(index, event)
                if isinstance(event, End):
                    yield self._chunk(index, text, event.reason)
                elif text or self._choices[index].ready:
                    yield self._chunk(index, text, None)
        except Broken as broken:
            yield sse(body_of(broken.as_refusal(), "openai"))
            return
        last: dict[str, Any] = {**self._base, "choices": [], "x_spec": self._told()}
        if self._include_usage:
            yield sse({**last, "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _take(self, index: int, event: Piece | Scored | End) -> str:
        """Take in an event; returns the text that it adds."""
        if isinstance(event, End):
            self._ends[index] = event
        return self._choices[index].take(event)

    def _chunk(self, index: int, text: str, reason: str | None) -> bytes:
        extra = {}
        if reason is not None and not self._include_usage and index == 0:
            extra["x_spec"] = x_spec(self._ends[index].figures)
        return sse({**self._base, "choices": [self._choice(index, text, reason)], **extra})

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        logprobs = self._choices[index].logprobs()
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _figures(self) -> list[Figures]:
        return [self._ends[i].figures for i in sorted(self._ends)]

    def _usage(self) -> dict[str, Any]:
        figures, n = self._figures(), self._wish.n
        usage = openai_usage(figures)
        prompts = sum(f.prompt_tokens for f in figures[::n])
        cached = sum(
            min(f.cached_tokens for f in figures[i : i + n]) for i in range(0, len(figures), n)
        )
        usage["prompt_tokens"] = prompts
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        usage["total_tokens"] = prompts + usage["completion_tokens"]
        return usage

    def _told(self) -> dict[str, Any]:
        return x_spec(self._figures()[0], self._wish.notices)


class _Choice:
    """One text being put together, with the tokens that begin in it.

    Args:
        words: For the texts of tokens.
        prompt: Ids before it.
        echo: What it begins with.
        n_top: Alternatives per token; None for no log-probabilities.
    """

    def __init__(self, words: Words, prompt: Sequence[int], echo: str, n_top: int | None) -> None:
        self._words = words
        self._n_top = n_top
        self._echo = echo  # not handed out yet
        self._places = TextPlaces(words, prompt, echo)
        self._n_said = 0
        self._held: list[tuple[TokenInfo, int]] = []  # with the text that they stand for
        self.ready: list[tuple[TokenInfo, int]] = []

    def take(self, event: Piece | Scored | End) -> str:
        """Take in an event; returns the text that it adds, the prompt in front of the first."""
        text, self._echo = self._echo, ""
        text += event.text if isinstance(event, Piece) else ""
        self._n_said += len(text)
        if self._n_top is None:
            return text
        if not isinstance(event, End):
            scored = isinstance(event, Scored)
            places = self._places.echoed() if scored else self._places.next(event.tokens)
            self._held += zip(event.tokens, places, strict=True)
        cut = isinstance(event, End) and event.stop_string is not None
        done = isinstance(event, End) and not cut
        self.ready += [pair for pair in self._held if done or pair[1] < self._n_said]
        self._held = [pair for pair in self._held if not done and pair[1] >= self._n_said]
        return text

    def logprobs(self) -> dict[str, Any] | None:
        """Those of the tokens that became ready; None without any."""
        pairs, self.ready = self.ready, []
        if not pairs or self._n_top is None:
            return None
        tokens, places = zip(*pairs, strict=True)
        return legacy_entries(tokens, places, self._words, self._n_top)
