"""How a server behaves; nothing here is read from the environment."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one server.

    Attributes:
        host: Address to bind.
        port: Port to bind.
        api_key: Required of every route but /health; None asks for none.
        allowed_hosts: Names that the Host header may hold beside loopback and `host`; "*" is any.
        cors_origins: Origins whose pages may call the server; empty allows none but its own.
        max_body_bytes: Largest request body.
        max_queue: Requests that may wait; one more is answered 429.
        max_batch: Requests that are decoded at the same time.
        kv_bytes: Memory for the caches of running requests, by what they may grow to: requests that
            share a forward take as much each as the longest, and as if their number were a power of
            two. Twice as much for a moment when one joins or leaves. None sets no limit.
        prefix_bytes: Memory for states of earlier prompts; 0 keeps none.
        prefix_dir: Folder that keeps such states over restarts; None keeps none.
        prefix_disk_bytes: Most bytes in that folder.
        keep_alive_s: Longest silence on a stream.
        prefill_chunk: Prompt tokens per forward.
        default_max_tokens: Where the request names no limit; None goes on to the context's end.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_queue: int = 64
    max_batch: int = 8
    kv_bytes: int | None = None
    prefix_bytes: int = 2 * 2**30
    prefix_dir: Path | None = None
    prefix_disk_bytes: int = 16 * 2**30
    keep_alive_s: float = 5.0
    prefill_chunk: int = 512
    default_max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_batch", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"[serve] {name} must be >= 1, got {getattr(self, name)}.")
        for name in ("max_queue", "prefix_bytes", "prefix_disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"[serve] {name} must be >= 0, got {getattr(self, name)}.")
        if not self.keep_alive_s > 0:
            raise ValueError(f"[serve] keep_alive_s must be > 0, got {self.keep_alive_s}.")
        for name in self.allowed_hosts:
            if not _is_host(name):
                raise ValueError(
                    f'[serve] An allowed host must be a name without scheme and port, or "*", got '
                    f'"{name}".'
                )
        for origin in self.cors_origins:
            if not _is_origin(origin):
                raise ValueError(
                    "[serve] A CORS origin must be like http://localhost:3000, without a path, or "
                    f'"*", got "{origin}".'
                )
        if self.api_key is not None and not self.api_key:
            raise ValueError("[serve] The API key must hold at least one character, got none.")


def _is_host(name: str) -> bool:
    """Whether a Host header can hold this name beside its port."""
    return name == "*" or bool(name) and not set(name) & set("/@ ") and name.count(":") != 1


def _is_origin(origin: str) -> bool:
    """Whether a browser can send this as the origin of a page."""
    if origin in ("*", "null"):
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and origin == f"{parts.scheme}://{parts.netloc}"
