"""Request bodies as JSON in which every key occurs once: of two values none is lost silently."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


class _Body(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_unique)


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
            raise json.JSONDecodeError(f'the key "{key[:80]}" must occur once, got it twice', "", 0)
        found[key] = value
    return found
