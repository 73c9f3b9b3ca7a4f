"""Answers of /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from spec_server.answer import Part
from spec_server.dialects.common import Reply, new_id, openai_usage, sse, x_spec
from spec_server.errors import body_of
from spec_server.exchange import Broken, Exchange
from spec_server.jobs import End, Piece
from spec_server.logprobs import chat_entries
from spec_server.schema.base import Wish
from spec_server.words import Words


class ChatAnswer:
    """All choices of one chat completion.

    Args:
        exchange: The generations.
        replies: One per choice.
        wish: The request.
        model: The model's name.
        words: For the texts of tokens.
        include_usage: Send usage at the end of a stream, and null before.
    """

    def __init__(
        self,
        exchange: Exchange,
        replies: list[Reply],
        wish: Wish,
        model: str,
        words: Words,
        include_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._replies = replies
        self._wish = wish
        self._words = words
        self._include_usage = include_usage
        self._base: dict[str, Any] = {
            "id": f"chatcmpl-{exchange.id}",
            "created": exchange.created,
            "model": model,
            "system_fingerprint": None,
        }
        if include_usage:
            self._base["usage"] = None
        self._calls = [0] * len(replies)

    async def whole(self) -> dict[str, Any]:
        """The finished completion."""
        parts: list[list[Part]] = [[] for _ in self._replies]
        async for item in self._exchange.events():
            if item is not None and isinstance(item[1], Piece | End):
                parts[item[0]] += self._replies[item[0]].take(item[1])
        choices = [self._choice(i, own) for i, own in enumerate(parts)]
        return {
            **self._base,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(),
            "x_spec": self._told(),
        }

    async def stream(self, silence_s: float) -> AsyncIterator[bytes]:
        """Chunks, then `[DONE]`."""
        for i in range(len(self._replies)):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        try:
            async for item in self._exchange.events(silence_s):
                if item is None:
                    waiting = next(i for i, r in enumerate(self._replies) if r.end is None)
                    yield self._chunk(waiting, {})
                    continue
                index, event = item
                if not isinstance(event, Piece | End):
                    continue
                for data in self._chunks(index, event):
                    yield data
        except Broken as broken:
            yield sse(body_of(broken.as_refusal(), "openai"))
            return
        last: dict[str, Any] = {"x_spec": self._told()}
        if self._include_usage:
            last["usage"] = self._usage()
            yield sse({**self._base, "object": "chat.completion.chunk", "choices": [], **last})
        yield b"data: [DONE]\n\n"

    # -- parts -----------------------------------------------------------------------------------

    def _chunks(self, index: int, event: Piece | End) -> list[bytes]:
        reply = self._replies[index]
        chunks = [self._chunk(index, self._delta(index, part)) for part in reply.take(event)]
        if isinstance(event, End):
            extra = (
                {}
                if self._include_usage or index
                else {"x_spec": x_spec(event.figures, self._wish.notices)}
            )
            chunks.append(self._chunk(index, {}, self._reason(reply), **extra))
        elif event.by_token:
            tokens = [{"text": t.text, "origin": t.origin} for t in event.by_token]
            chunks.append(self._chunk(index, {}, x_spec={"tokens": tokens}))
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, **extra: Any
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
        }
        wants = self._wish.top_logprobs is not None and (delta.get("content") or reason)
        if wants and (found := self._take_logprobs(index)):
            choice["logprobs"] = {"content": found, "refusal": None}
        return sse({**self._base, "object": "chat.completion.chunk", "choices": [choice], **extra})

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.call is None:
            return {"content": part.text}
        at = self._calls[index]
        self._calls[index] += 1
        return {"tool_calls": [{"index": at, **_call(part)}]}

    def _choice(self, index: int, parts: list[Part]) -> dict[str, Any]:
        text = "".join(p.text for p in parts if p.kind == "text")
        reasoning = "".join(p.text for p in parts if p.kind == "reasoning")
        calls = [_call(p) for p in parts if p.kind == "call"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._wish.top_logprobs is not None:
            logprobs = {"content": self._take_logprobs(index), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(self._replies[index]),
        }

    def _take_logprobs(self, index: int) -> list[dict[str, Any]]:
        reply = self._replies[index]
        found, reply.logprobs = reply.logprobs, []
        return chat_entries(found, self._words)

    def _reason(self, reply: Reply) -> str:
        assert reply.end is not None
        return "tool_calls" if reply.made_call else reply.end.reason

    def _usage(self) -> dict[str, Any]:
        usage = openai_usage([r.end.figures for r in self._replies if r.end is not None])
        n_reasoning = sum(reply.n_reasoning for reply in self._replies)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": n_reasoning}}

    def _told(self) -> dict[str, Any]:
        end = self._replies[0].end
        assert end is not None
        return x_spec(end.figures, self._wish.notices)


def _call(part: Part) -> dict[str, Any]:
    assert part.call is not None
    function = {"name": part.call.name, "arguments": part.call.arguments}
    return {"id": new_id("call_"), "type": "function", "function": function}
