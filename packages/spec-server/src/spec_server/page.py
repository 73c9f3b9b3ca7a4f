"""The page at `/`: one file without a build step, and without a request to anywhere else."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    """Serve the page."""
    text = files("spec_server").joinpath("static/index.html").read_text(encoding="utf-8")
    policy = _POLICY.format(script=_source(text, "script"), style=_source(text, "style"))

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)


def _source(text: str, tag: str) -> str:
    """The one element of a kind that the browser may run, by its digest."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
