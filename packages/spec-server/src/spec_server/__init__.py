"""OpenAI- and Anthropic-compatible HTTP server for speculative decoding on MLX."""

from spec_server.engine import Engine
from spec_server.jobs import Served
from spec_server.server import Server
from spec_server.settings import Settings

__all__ = ["Engine", "Served", "Server", "Settings"]
