"""What a server says about itself: its model, and whether it can answer."""

from typing import Any

from spec_server.engine import Engine
from spec_server.errors import Refusal

_SINCE = 1_700_000_000  # no checkpoint says when it was made
_SINCE_TEXT = "2023-11-14T22:13:20Z"


def health_of(engine: Engine) -> dict[str, Any]:
    """The body of /health: "ok" only while the engine thread really serves."""
    status = engine.status
    if status == "ok" and not engine.alive:
        status = "failed"
    body: dict[str, Any] = {"status": status, "running": engine.n_running}
    body["waiting"] = engine.n_waiting
    if status != "ok":
        body["problem"] = engine.describe()
    if engine.served is not None:
        prefix = engine.prefix
        body |= {
            "model": engine.served.model,
            "mode": engine.served.mode,
            "context_length": engine.context_length,
            "max_batch": engine.settings.max_batch,
            "batching": engine.batch_refusal or "on",
            "prefix_cache": {
                "enabled": prefix is not None and prefix.enabled,
                "bytes": prefix.nbytes if prefix is not None else 0,
                "budget_bytes": engine.settings.prefix_bytes,
                "states": len(prefix.entries) if prefix is not None else 0,
            },
        }
    return body


def models_of(engine: Engine) -> dict[str, Any]:
    """The body of /v1/models, in the words of both dialects."""
    if engine.served is None:
        raise Refusal(f"[engine] {engine.describe()}", status=503)
    name = engine.served.model
    return {
        "object": "list",
        "data": [_model(name)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }


def model_of(engine: Engine, name: str) -> dict[str, Any]:
    """The body of /v1/models/NAME.

    Raises:
        Refusal: another name than the served model's.
    """
    known = models_of(engine)["data"][0]
    if name != known["id"]:
        raise Refusal(
            f'No model "{name}" here. This server answers as "{known["id"]}".',
            status=404,
            code="model_not_found",
        )
    return known


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _SINCE,
        "owned_by": "spec",
        "type": "model",
        "display_name": name,
        "created_at": _SINCE_TEXT,
        "lifecycle": "active",
    }
