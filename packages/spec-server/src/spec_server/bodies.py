"""Request bodies as JSON: every key once, so that nothing is lost silently, and Unicode text.

A body is parsed on the event loop, where nobody else is served meanwhile: values by the million
hold it up for many seconds. So they are counted before, which takes a tenth of one.
"""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from spec_server.tools import check_unicode

MOST_VALUES = 500_000  # the ids of two long prompts; texts count as one, however long
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that may be one


class _Body(Request):
    async def json(self) -> Any:
        packed = self.headers.get("content-encoding", "identity")
        if packed.lower() != "identity":
            raise _wrong(f'it must not be packed, got Content-Encoding "{packed}"')
        body = await self.body()
        if _count_values(body) > MOST_VALUES:
            raise _wrong(f"it must hold at most {MOST_VALUES} values, got more")
        try:
            text = body.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _wrong(f"text must be UTF-8, got {error.reason} at byte {error.start}") from None
        try:
            found = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_a_number)
            if _HALF_PAIR.search(body):
                check_unicode(found)
        except UnicodeEncodeError:
            raise _wrong("text must be Unicode, got half of a surrogate pair") from None
        except RecursionError:
            raise _wrong("it must not be nested so deeply") from None
        return found


class UniqueKeys(APIRoute):
    """A route whose body may not hold a key twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with the body read here."""
        handle = super().get_route_handler()

        async def own(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return own


def _count_values(body: bytes) -> int:
    """At least the number of values in a JSON text, without parsing it."""
    plain = body
    if b"\\" in body:
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_texts = plain.count(b'"') // 2
    if n_texts > 2 * MOST_VALUES:  # a key and a value each
        return n_texts
    outside = b"".join(plain.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{")))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            shown = key[:80].encode(errors="backslashreplace").decode()
            raise _wrong(f'the key "{shown}" must occur once, got it twice')
        found[key] = value
    return found


def _not_a_number(name: str) -> float:
    raise _wrong(f"numbers must be finite, got {name}")


def _wrong(problem: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(problem, "", 0)
