"""The HTTP application: routes behind the gate, and errors in each dialect's own shape."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from spec_server.bodies import UniqueKeys
from spec_server.engine import Engine
from spec_server.errors import Refusal, body_of, dialect_of
from spec_server.gate import Gate, too_large
from spec_server.page import add_page
from spec_server.routes import add_facts, add_messages, add_openai
from spec_server.service import Service
from spec_server.settings import Settings

_log = logging.getLogger("spec_server")
_LABELS = frozenset({"body", "query", "path", "str", "int"})


def create_app(engine: Engine, settings: Settings) -> ASGIApp:
    """The application around an engine that is loading or loaded.

    Args:
        engine: Who generates; the application neither starts nor stops it.
        settings: How the server behaves.
    """
    service = Service(engine, settings)
    app = FastAPI(title="spec", docs_url=None, redoc_url=None)
    app.router.route_class = UniqueKeys
    add_openai(app, service)
    add_messages(app, service)
    add_facts(app, service)
    add_page(app)
    _add_errors(app, settings)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    gate = Gate(app, settings, engine.metrics, paths)
    if not settings.cors_origins:
        return gate
    return CORSMiddleware(  # around the gate: a browser shows a page no refusal without its headers
        gate,
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )


def _add_errors(app: FastAPI, settings: Settings) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
        return _told(request, refusal, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return _told(request, refusal_of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 413:
            return _told(request, too_large(settings))
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _told(request, Refusal(message, status=error.status_code), error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        _log.error("[bug] %s %s", request.method, request.url.path, exc_info=error)
        return _told(request, Refusal(f"[bug] {type(error).__name__}: {error}", status=500))


def refusal_of(error: RequestValidationError) -> Refusal:
    """The first thing that is wrong with a body, in words, with the field's name."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))  # unions: the nearest one
    names = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    path = ""
    for part in names:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if first["type"] == "extra_forbidden":
        message = f'"{path}" is not supported by this server. Leave it out.'
    elif first["type"] == "json_invalid":
        message, path = f"The body must be JSON: {first['ctx'].get('error', '')}.", ""
    elif first["type"] == "missing":
        message = f'"{path or "body"}" must be given, and is missing.'
    elif isinstance(first.get("input"), bytes):  # nobody parsed it
        message = 'The body must be declared as JSON: send "Content-Type: application/json".'
    else:
        given = _shown(first.get("input"))
        message = f'"{path or "body"}" {_lower(first["msg"])}, got {given}.'
    return Refusal(message, param=path or None)


def _is_field(part: str) -> bool:
    """False for the labels that pydantic puts between the fields of a union."""
    return part.islower() and part.isidentifier() and part not in _LABELS


def _told(
    request: Request, refusal: Refusal, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    body = body_of(refusal, dialect_of(request.url.path))
    return JSONResponse(body, refusal.status, headers=dict(headers) if headers else None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lower(message: str) -> str:
    return message.removeprefix("Input ").removeprefix("Value error, ") or message
