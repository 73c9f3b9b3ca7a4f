"""Request bodies as JSON: every key once, so that nothing is lost silently, and Unicode text."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from spec_server.tools import check_unicode


class _Body(Request):
    async def json(self) -> Any:
        found = json.loads(
            await self.body(), object_pairs_hook=_unique, parse_constant=_not_a_number
        )
        try:
            check_unicode(found)
        except UnicodeEncodeError:
            raise _wrong("text must be Unicode, got half of a surrogate pair") from None
        return found


class UniqueKeys(APIRoute):
    """A route whose body may not hold a key twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with the body read here."""
        handle = super().get_route_handler()

        async def own(request: Request) -> Response:
            return await handle(_Body(request.scope, request.receive))

        return own


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
