"""The endpoints: one function each, from a checked body to an answer."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from spec_server.dialects.chat import ChatAnswer
from spec_server.dialects.common import Reply
from spec_server.dialects.completions import CompletionAnswer
from spec_server.dialects.messages import MessageAnswer
from spec_server.dialects.responses import ResponseAnswer
from spec_server.errors import Refusal
from spec_server.exchange import Exchange
from spec_server.health import health_of, model_of, models_of
from spec_server.schema.anthropic import CountBody, MessagesBody, chat_of, messages_wish
from spec_server.schema.openai import (
    ChatBody,
    CompletionBody,
    chat_wish,
    completion_prompts,
    wish_of,
)
from spec_server.schema.responses import ResponsesBody, responses_wish
from spec_server.service import Service, answered

_DEFAULT_COMPLETION = 16  # tokens, as the API has it


def add_openai(app: FastAPI, service: Service) -> None:
    """The OpenAI dialect: chat completions, completions, responses."""
    silence_s = service.settings.keep_alive_s

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        prompter = service.prompter
        asked = chat_wish(body, knows_effort="reasoning_effort" in prompter.template)
        wish, prompt = asked.wish, await service.render(asked.chat)
        asks = await service.asks(wish, [prompt.ids], service.settings.default_max_tokens, prompt)
        exchange = Exchange(service.engine, asks, request, stream=wish.stream)
        replies = [Reply(prompter, prompt.marks, asked.chat.tools, wish.one_call) for _ in asks]
        usage = bool(body.stream_options and body.stream_options.include_usage)
        answer = ChatAnswer(exchange, replies, wish, service.model, prompter.words, usage)
        return await answered(exchange, answer, stream=wish.stream, silence_s=silence_s)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        prompter = service.prompter
        if body.stream_options is not None and not body.stream:
            raise Refusal('"stream_options" is only for "stream": true.', param="stream_options")
        if body.max_tokens == 0 and not body.echo:
            raise Refusal('"max_tokens" must be at least 1 without "echo".', param="max_tokens")
        wish = wish_of(
            body, max_tokens=body.max_tokens, top_logprobs=body.logprobs, echo=bool(body.echo)
        )
        prompts: list[tuple[int, ...]] = []
        echoes: list[str] = []
        for prompt in completion_prompts(body):
            text = isinstance(prompt, str)
            ids = await run_in_threadpool(prompter.text, prompt) if text else tuple(prompt)
            prompts.append(_checked(ids, prompter.vocab_size))
            if wish.echo:
                said = prompt if text else await run_in_threadpool(prompter.decode, ids)
                echoes += [said] * wish.n
        asks = await service.asks(wish, prompts, _DEFAULT_COMPLETION)
        exchange = Exchange(service.engine, asks, request, stream=wish.stream)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        answer = CompletionAnswer(exchange, wish, service.model, prompter.words, usage, echoes)
        return await answered(exchange, answer, stream=wish.stream, silence_s=silence_s)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        prompter = service.prompter
        asked = responses_wish(body, knows_effort="reasoning_effort" in prompter.template)
        prompt = await service.render(asked.chat)
        asks = await service.asks(
            asked.wish, [prompt.ids], service.settings.default_max_tokens, prompt
        )
        exchange = Exchange(service.engine, asks, request, stream=asked.wish.stream)
        reply = Reply(prompter, prompt.marks, asked.chat.tools, asked.wish.one_call)
        answer = ResponseAnswer(exchange, reply, asked, service.model, prompter.words)
        return await answered(exchange, answer, stream=asked.wish.stream, silence_s=silence_s)


def add_messages(app: FastAPI, service: Service) -> None:
    """The Anthropic dialect: messages and their token counts."""

    @app.post("/v1/messages")
    async def messages(request: Request, body: MessagesBody) -> Response:
        prompter = service.prompter
        asked = messages_wish(
            body,
            knows_effort="reasoning_effort" in prompter.template,
            reasons=prompter.think is not None,
        )
        prompt = await service.render(asked.chat)
        asks = await service.asks(asked.wish, [prompt.ids], None, prompt)
        exchange = Exchange(service.engine, asks, request, stream=asked.wish.stream)
        reply = Reply(prompter, prompt.marks, asked.chat.tools, asked.wish.one_call)
        answer = MessageAnswer(exchange, reply, asked.wish, service.model)
        silence_s = service.settings.keep_alive_s
        return await answered(exchange, answer, stream=asked.wish.stream, silence_s=silence_s)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        chat, _ = chat_of(body, knows_effort="reasoning_effort" in service.prompter.template)
        return {"input_tokens": len((await service.render(chat)).ids)}


def add_facts(app: FastAPI, service: Service) -> None:
    """What is served, how it is, and what it did."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return models_of(service.engine)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return model_of(service.engine, name)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        body = health_of(service.engine)
        return JSONResponse(body, 200 if body["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        page = service.engine.metrics.text()
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")


def _checked(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise Refusal('"prompt" must hold at least one token, got none.', param="prompt")
    wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise Refusal(
            f'"prompt" must hold ids in 0..{vocab_size - 1}, got {wrong}.', param="prompt"
        )
    return ids
