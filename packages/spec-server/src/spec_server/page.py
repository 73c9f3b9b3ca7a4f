"""The page at `/`: one file without a build step, and without a request to anywhere else."""

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    """Serve the page."""
    text = files("spec_server").joinpath("static/index.html").read_text(encoding="utf-8")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)
