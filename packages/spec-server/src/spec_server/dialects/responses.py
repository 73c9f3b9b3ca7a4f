"""Answers of /v1/responses. Nothing is stored: each request brings the whole conversation."""

from collections.abc import AsyncIterator
from typing import Any

from spec_server.answer import Part
from spec_server.dialects.common import Reply, new_id, sse, x_spec
from spec_server.exchange import Broken, Exchange
from spec_server.jobs import End, Figures, Piece
from spec_server.logprobs import chat_entries
from spec_server.schema.base import ChatWish
from spec_server.words import Words


class ResponseAnswer:
    """One response.

    Args:
        exchange: The generation.
        reply: Its answer.
        ask: The request.
        model: The model's name.
        words: For the texts of tokens.
    """

    def __init__(
        self, exchange: Exchange, reply: Reply, ask: ChatWish, model: str, words: Words
    ) -> None:
        self._exchange = exchange
        self._reply = reply
        self._ask = ask
        self._model = model
        self._words = words
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []  # of the open item
        self._n_events = 0

    async def whole(self) -> dict[str, Any]:
        """The finished response."""
        async for item in self._exchange.events():
            if item is not None and isinstance(item[1], Piece | End):
                for part in self._reply.take(item[1]):
                    self._part(part)
        self._close()
        return self._response(self._status())

    async def stream(self, silence_s: float) -> AsyncIterator[bytes]:
        """Events from response.created to the last one."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        try:
            async for item in self._exchange.events(silence_s):
                if item is None:
                    yield self._event(
                        "response.in_progress", response=self._response("in_progress")
                    )
                elif isinstance(item[1], Piece | End):
                    for part in self._reply.take(item[1]):
                        for data in self._part(part):
                            yield data
        except Broken as broken:
            self._fill()
            failed = self._response("failed")
            failed["error"] = {"code": "server_error", "message": broken.failure.message}
            yield self._event("response.failed", response=failed)
            return
        for data in self._close():
            yield data
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    # -- items -----------------------------------------------------------------------------------

    def _part(self, part: Part) -> list[bytes]:
        if part.call is not None:
            return [*self._close(), *self._call(part)]
        events: list[bytes] = []
        kind = "message" if part.kind == "text" else "reasoning"
        if self._open is None or self._open["type"] != kind:
            events += [*self._close(), *self._start(kind)]
        item = self._open
        assert item is not None
        self._texts.append(part.text)
        where = self._where(item)
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", **where, delta=part.text)]
        logprobs = self._logprobs(item)
        data = self._event(
            "response.output_text.delta", **where, delta=part.text, logprobs=logprobs
        )
        return [*events, data]

    def _start(self, kind: str) -> list[bytes]:
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": kind, "role": "assistant", "content": [content]}
        else:
            content = {"type": "reasoning_text", "text": ""}
            item = {"id": new_id("rs_"), "type": kind, "summary": [], "content": [content]}
        item["status"] = "in_progress"
        self._items.append(item)
        self._open = item
        added = {**item, "content": []}
        at = len(self._items) - 1
        return [
            self._event("response.output_item.added", output_index=at, item=added),
            self._event("response.content_part.added", **self._where(item), part=dict(content)),
        ]

    def _close(self) -> list[bytes]:
        self._fill()
        item, self._open = self._open, None
        if item is None:
            return []
        cut = self._reply.end is not None and self._reply.end.reason == "length"
        item["status"] = "incomplete" if cut else "completed"
        part, where = item["content"][0], self._where(item)
        if item["type"] == "message":
            more = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._event("response.output_text.done", **where, **more)
        else:
            done = self._event("response.reasoning_text.done", **where, text=part["text"])
        return [
            done,
            self._event("response.content_part.done", **where, part=part),
            self._event("response.output_item.done", output_index=where["output_index"], item=item),
        ]

    def _fill(self) -> None:
        """Write what has been said into the open item."""
        if self._open is not None:
            self._open["content"][0]["text"] += "".join(self._texts)
        self._texts.clear()

    def _call(self, part: Part) -> list[bytes]:
        assert part.call is not None
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": new_id("call_"),
            "name": part.call.name,
            "arguments": part.call.arguments,
            "status": "completed",
        }
        self._items.append(item)
        at = len(self._items) - 1
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": at}
        arguments = part.call.arguments
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=arguments),
            self._event(
                "response.function_call_arguments.done",
                **where,
                name=part.call.name,
                arguments=arguments,
            ),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _logprobs(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        if self._ask.wish.top_logprobs is None:
            return []
        found, self._reply.logprobs = self._reply.logprobs, []
        entries = chat_entries(found, self._words)
        item["content"][0]["logprobs"] += entries
        return entries

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        at = next(i for i, known in enumerate(self._items) if known is item)
        return {"item_id": item["id"], "output_index": at, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return sse(body, kind)

    # -- the response ----------------------------------------------------------------------------

    def _status(self) -> str:
        assert self._reply.end is not None
        return "incomplete" if self._reply.end.reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        end, wish = self._reply.end, self._ask.wish
        return {
            "id": f"resp_{self._exchange.id}",
            "object": "response",
            "created_at": self._exchange.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "max_output_tokens": wish.max_tokens,
            "model": self._model,
            "output": [] if status == "in_progress" else list(self._items),
            "parallel_tool_calls": not wish.one_call,
            "previous_response_id": None,
            "store": False,
            "temperature": wish.sampling.temperature,
            "top_p": wish.sampling.top_p,
            "truncation": "disabled",
            "usage": _usage(end.figures, self._reply.n_reasoning) if end is not None else None,
            **self._ask.echo,
            "x_spec": x_spec(end.figures, wish.notices) if end is not None else None,
        }


def _usage(figures: Figures, n_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": figures.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
    }
