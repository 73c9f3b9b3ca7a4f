"""What a request must pass before any route sees it: host, origin, key, size. Plain ASGI.

Clients give the key as a bearer token or x-api-key. A browser that opens the page is asked for it
by HTTP Basic, any name and the key as password, and sends it along with what the page asks for.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_server.dialects.common import sse
from spec_server.errors import Refusal, body_of, dialect_of
from spec_server.metrics import Metrics
from spec_server.settings import LOOPBACK, Settings

_SILENCE_S = 60.0  # within a body; a client that has died is not always noticed
_OPEN = frozenset({"/health"})


class Gate:
    """Wraps the application.

    Args:
        app: The application.
        settings: What is allowed.
        metrics: Counts responses.
        paths: Paths that are counted by name; any other counts as "other".
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = paths
        self._hosts = LOOPBACK | {
            settings.host.lower(),
            *(h.lower() for h in settings.allowed_hosts),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request pass, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        begun: Message | None = None

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await _answer(refusal, scope["path"], counting)
            return
        try:
            await self._app(scope, _Limited(receive, self._settings.max_body_bytes), counting)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            await _break_off(begun, scope["path"], counting)

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if not self._known_host(headers.get("host", "")):
            return Refusal(
                f'[host] The Host header must name this server, got "{headers.get("host", "")}". '
                "Allow it with --allowed-host.",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and not self._known_origin(origin, headers.get("host", "")):
            return Refusal(
                f'[origin] Pages of "{origin}" may not call this server. '
                "Allow them with --cors-origin.",
                status=403,
            )
        if scope["path"] not in _OPEN and not self._has_key(headers):
            return Refusal(
                "[key] The API key must be given as a bearer token, x-api-key or the password of "
                "HTTP Basic, and match.",
                status=401,
                code="invalid_api_key",
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            return too_large(self._settings)
        return None

    def _known_host(self, host: str) -> bool:
        if "*" in self._hosts:
            return True
        name = _split(f"//{host}").hostname if host else ""
        if (name or "") in self._hosts:
            return True
        return self._bound_everywhere and _is_address(name or "")

    @property
    def _bound_everywhere(self) -> bool:
        return self._settings.host in ("0.0.0.0", "::")

    def _known_origin(self, origin: str, host: str) -> bool:
        allowed = self._settings.cors_origins
        own = bool(host) and _split(origin).netloc == host
        return own or origin in allowed or "*" in allowed

    def _has_key(self, headers: Headers) -> bool:
        key = self._settings.api_key
        if key is None:
            return True
        given = [headers.get("x-api-key", "").encode("latin-1")]  # the bytes that came
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(token.strip().encode("latin-1"))
        elif scheme.lower() == "basic":
            given.append(_password(token.strip()))
        wanted = key.encode(errors="surrogateescape")
        return any([hmac.compare_digest(one, wanted) for one in given])


def _split(url: str) -> SplitResult:
    """The parts of an address; empty ones where it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _password(token: str) -> bytes:
    """The password of HTTP Basic; empty where there is none."""
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def too_large(settings: Settings) -> Refusal:
    """The answer to a body beyond the limit."""
    return Refusal(f"[body] A body may hold at most {settings.max_body_bytes} bytes.", status=413)


class _TooLarge(HTTPException):
    """The body grew beyond the limit while it was read; a kind that body parsers let through."""

    def __init__(self) -> None:
        super().__init__(413)


class _Limited:
    """Counts the bytes of a body as they come, and does not wait for ever for the next ones."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._n = 0
        self._ended = False  # the client's leaving is awaited for as long as its answer takes

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(None if self._ended else _SILENCE_S):
                message = await self._receive()
        except TimeoutError:
            detail = f"[body] The body must go on within {_SILENCE_S:g} s, got nothing."
            raise HTTPException(408, detail, {"Connection": "close"}) from None
        self._ended = not message.get("more_body", False)
        self._n += len(message.get("body", b""))
        if self._n > self._most:
            raise _TooLarge
        return message


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _break_off(begun: Message | None, path: str, send: Send) -> None:
    """Tell a client that waits for an answer, or for more of it, that nothing else will come."""
    refusal = Refusal("The server is shutting down.", status=503)
    if begun is None:
        await _answer(refusal, path, send)
    elif Headers(raw=begun["headers"]).get("content-type", "").startswith("text/event-stream"):
        dialect = dialect_of(path)
        event = sse(body_of(refusal, dialect), "error" if dialect == "anthropic" else None)
        await send({"type": "http.response.body", "body": event})


async def _answer(refusal: Refusal, path: str, send: Send) -> None:
    body = json.dumps(body_of(refusal, dialect_of(path))).encode()
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refusal.status == 401:  # only the page makes a browser ask
        asks = b'Basic realm="spec", charset="UTF-8"' if path == "/" else b"Bearer"
        headers.append((b"www-authenticate", asks))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
