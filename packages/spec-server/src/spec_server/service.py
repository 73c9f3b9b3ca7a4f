"""The engine as the routes see it: prompts rendered, asks made, answers sent."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from spec_server.engine import Engine
from spec_server.errors import Refusal
from spec_server.exchange import Broken, ClientGone, Exchange
from spec_server.jobs import ENDLESS, Ask
from spec_server.prompts import Chat, Prompt, Prompter
from spec_server.schema.base import Wish
from spec_server.settings import Settings

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GONE = 499  # nobody reads it


class Service:
    """The engine with what HTTP needs beside it.

    Args:
        engine: Loading or loaded.
        settings: How the server behaves.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self._prompter: Prompter | None = None

    @property
    def prompter(self) -> Prompter:
        """Made at the first request.

        Raises:
            Refusal: nothing is loaded.
        """
        if self._prompter is None:
            served = self.engine.served
            if served is None or self.engine.machinery is None:
                raise Refusal(f"[engine] {self.engine.describe()}", status=503)
            target = served.pair.target
            self._prompter = Prompter(
                served.pair.tokenizer, target.vocab_size, target.context_length
            )
        return self._prompter

    @property
    def model(self) -> str:
        """The name in answers."""
        return self.engine.served.model if self.engine.served is not None else ""

    async def render(self, chat: Chat) -> Prompt:
        """Ids of a conversation."""
        return await run_in_threadpool(self.prompter.chat, chat)

    async def asks(
        self,
        wish: Wish,
        prompts: list[tuple[int, ...]],
        default: int | None,
        chat: Prompt | None = None,
    ) -> list[Ask]:
        """What the engine is asked: n answers to each prompt, seeds counted up."""
        grammar = chat.grammar if chat is not None else None
        if grammar is not None:
            problem = await run_in_threadpool(self.prompter.check_grammar, grammar)
            if problem is not None:
                tools = chat is not None and (chat.marks.call is not None or chat.marks.bare)
                param = "tools" if tools else "response_format"
                raise Refusal(
                    f'"{param}" must hold a schema that can be followed: {problem}', param=param
                )
        vocab_size = self.prompter.vocab_size
        wrong = next((t for t, _ in wish.biases if t >= vocab_size), None)
        if wrong is not None:
            raise Refusal(
                f'"logit_bias" must name ids below {vocab_size}, got {wrong}.', param="logit_bias"
            )
        after: tuple[int, ...] = ()
        if grammar is not None and chat is not None and chat.marks.in_reasoning:
            after = self.prompter.after_reasoning()
        budget = None
        if wish.reasoning_tokens is not None and chat is not None and chat.marks.think is not None:
            budget = self.prompter.budget(wish.reasoning_tokens, chat.marks)
        limit = wish.max_tokens if wish.max_tokens is not None else default
        limit = ENDLESS if limit is None else min(limit, ENDLESS - 1)
        asks = []
        for prompt in prompts:
            for i in range(wish.n):
                seed = wish.sampling.seed
                if seed is not None:
                    seed = (seed + i) % 2**64
                asks.append(
                    Ask(
                        prompt=prompt,
                        max_tokens=limit,
                        sampling=replace(wish.sampling, seed=seed),
                        stop=wish.stop,
                        channels=chat is not None and chat.marks.harmony,
                        in_reasoning=chat is not None and chat.marks.in_reasoning,
                        top_logprobs=wish.top_logprobs,
                        score_prompt=wish.echo and wish.top_logprobs is not None,
                        biases=wish.biases,
                        grammar=grammar,
                        grammar_after=after,
                        budget=budget,
                        max_draft=wish.max_draft,
                        by_token=wish.by_token,
                        show_markers=chat is not None,
                    )
                )
        return asks


async def answered(exchange: Exchange, answer: Any, *, stream: bool, silence_s: float) -> Response:
    """Send an answer, whole or as it comes."""
    if stream:
        data = _guarded(answer.stream(silence_s), exchange)
        return StreamingResponse(data, media_type="text/event-stream", headers=SSE_HEADERS)
    try:
        return JSONResponse(await answer.whole())
    except Broken as broken:
        raise broken.as_refusal() from None
    except ClientGone:
        return Response(status_code=_GONE)
    finally:
        exchange.cancel()


async def _guarded(stream: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    """A stream that ends quietly when its client leaves, and cancels whatever still runs."""
    try:
        async for data in stream:
            yield data
    except ClientGone:
        return
    finally:
        exchange.cancel()
