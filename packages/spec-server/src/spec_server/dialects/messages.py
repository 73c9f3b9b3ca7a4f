"""Answers of /v1/messages."""

import json
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

from spec_server.answer import Part
from spec_server.dialects.common import Reply, new_id, sse, x_spec
from spec_server.errors import body_of
from spec_server.exchange import Broken, Exchange
from spec_server.jobs import End, Figures, Piece
from spec_server.schema.base import Wish


class MessageAnswer:
    """One message.

    Args:
        exchange: The generation.
        reply: Its answer.
        wish: The request.
        model: The model's name.
    """

    def __init__(self, exchange: Exchange, reply: Reply, wish: Wish, model: str) -> None:
        self._exchange = exchange
        self._reply = reply
        self._wish = wish
        self._base = {
            "id": f"msg_{exchange.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._n_blocks = 0
        self._open: str | None = None  # kind of the block that is open

    async def whole(self) -> dict[str, Any]:
        """The finished message."""
        parts: list[Part] = []
        async for item in self._exchange.events():
            if item is not None and isinstance(item[1], Piece | End):
                parts += self._take(item[1])
        end = self._end()
        return {
            **self._base,
            "content": _blocks(parts),
            "stop_reason": self._reason(),
            "stop_sequence": end.stop_string,
            "usage": usage(end.figures),
            "x_spec": x_spec(end.figures, self._wish.notices),
        }

    async def stream(self, silence_s: float) -> AsyncIterator[bytes]:
        """Events from message_start to message_stop."""
        n_prompt = len(self._exchange.asks[0].prompt)
        start = {
            **self._base,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": n_prompt, "output_tokens": 0},
        }
        yield sse({"type": "message_start", "message": start}, "message_start")
        yield sse({"type": "ping"}, "ping")
        try:
            async for item in self._exchange.events(silence_s):
                if item is None:
                    yield sse({"type": "ping"}, "ping")
                elif isinstance(item[1], Piece | End):
                    for part in self._take(item[1]):
                        for data in self._part(part):
                            yield data
        except Broken as broken:
            yield sse(body_of(broken.as_refusal(), "anthropic"), "error")
            return
        for data in self._close():
            yield data
        end = self._end()
        delta = {"stop_reason": self._reason(), "stop_sequence": end.stop_string}
        last = {
            "type": "message_delta",
            "delta": delta,
            "usage": usage(end.figures),
            "x_spec": x_spec(end.figures, self._wish.notices),
        }
        yield sse(last, "message_delta")
        yield sse({"type": "message_stop"}, "message_stop")

    def _take(self, event: Piece | End) -> list[Part]:
        """The parts that became final; reasoning that is not to be seen has no text."""
        parts = self._reply.take(event)
        if not self._wish.hide_reasoning:
            return parts
        return [Part("reasoning") if part.kind == "reasoning" else part for part in parts]

    # -- blocks of the stream --------------------------------------------------------------------

    def _part(self, part: Part) -> list[bytes]:
        events: list[bytes] = []
        if self._open != part.kind or part.kind == "call":
            events += self._close()
            events.append(self._start(part))
        index = self._n_blocks - 1
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        elif part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        if part.call is not None or part.text:
            body = {"type": "content_block_delta", "index": index, "delta": delta}
            events.append(sse(body, "content_block_delta"))
        return events

    def _start(self, part: Part) -> bytes:
        empty = Part(part.kind, "", part.call)
        block = _block(empty)
        if part.call is not None:
            block["input"] = {}
        body = {"type": "content_block_start", "index": self._n_blocks, "content_block": block}
        self._n_blocks += 1
        self._open = part.kind
        return sse(body, "content_block_start")

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        index, events = self._n_blocks - 1, []
        if self._open == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            body = {"type": "content_block_delta", "index": index, "delta": delta}
            events.append(sse(body, "content_block_delta"))
        self._open = None
        body = {"type": "content_block_stop", "index": index}
        return [*events, sse(body, "content_block_stop")]

    # -- the end ---------------------------------------------------------------------------------

    def _end(self) -> End:
        assert self._reply.end is not None
        return self._reply.end

    def _reason(self) -> str:
        end = self._end()
        if end.reason == "length":
            return "max_tokens"
        if self._reply.made_call:
            return "tool_use"
        return "stop_sequence" if end.stop_string is not None else "end_turn"


def usage(figures: Figures) -> dict[str, Any]:
    """Anthropic's usage: input tokens are those that were not read from the cache."""
    return {
        "input_tokens": figures.prompt_tokens - figures.cached_tokens,
        "cache_read_input_tokens": figures.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": figures.completion_tokens,
    }


def _blocks(parts: list[Part]) -> list[dict[str, Any]]:
    """The content of a message: a block for each call, and for texts of a kind that follow."""
    blocks: list[dict[str, Any]] = []
    for kind, run in groupby(parts, lambda part: part.kind):
        if kind == "call":
            blocks += map(_block, run)
        else:
            blocks.append(_block(Part(kind, "".join(part.text for part in run))))
    return blocks


def _block(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return {
            "type": "tool_use",
            "id": new_id("toolu_"),
            "name": part.call.name,
            "input": json.loads(part.call.arguments),
        }
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}
