"""An engine behind a listening socket: for the command line, and to embed in a program."""

import errno
import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self

import uvicorn

from spec_core import SpecError
from spec_server.app import create_app
from spec_server.engine import Engine
from spec_server.jobs import Served
from spec_server.metrics import Metrics
from spec_server.settings import LOOPBACK, Settings

_BACKLOG = 256  # connections that wait to be taken; asyncio logs each that finds no file free
_DRAIN_S = 10  # how long requests may go on after the server was told to end


class Server:
    """One model served over HTTP.

    Args:
        load: Loads what is served; called once, on the engine thread.
        settings: How the server behaves.
    """

    def __init__(self, load: Callable[[], Served], settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.engine = Engine(load, self.settings, Metrics())
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                create_app(self.engine, self.settings),
                host=self.settings.host,
                port=self.settings.port,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_DRAIN_S,
                backlog=_BACKLOG,
            )
        )
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    def load(self) -> None:
        """Take the port, then load the model and wait for it.

        Raises:
            SpecError: the port is not free, or the model cannot be served; the message says why.
        """
        self._socket = _bound(self.settings.host, self.settings.port)
        self.engine.start()
        if not self.engine.wait_ready():
            self._close()
            error = self.engine.error
            _forget_frames(error)
            self.engine.stop()
            if isinstance(error, SpecError):
                raise error
            raise SpecError(f"[serve] Loading broke off: {self.engine.problem}") from error

    def run(self) -> None:
        """Serve on this thread until a signal ends it; `load` comes first."""
        try:
            self._uvicorn.run(sockets=self._sockets)
        finally:
            self.engine.stop()
            self._close()

    def start(self) -> None:
        """Load, then serve on another thread; returns when the port listens."""
        self.load()
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=(self._sockets,), name="spec-http", daemon=True
        )
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise SpecError("[serve] The HTTP thread ended before it listened.")
            time.sleep(0.01)

    def stop(self) -> None:
        """End both threads."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(_DRAIN_S + 5)
        self.engine.stop()
        self._close()

    def _close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._socket = None

    @property
    def _sockets(self) -> list[socket.socket]:
        return [self._socket] if self._socket is not None else []

    @property
    def url(self) -> str:
        """Where it listens, once loaded."""
        (sock,) = self._sockets
        address = sock.getsockname()
        host = address[0] if ":" not in address[0] else f"[{address[0]}]"
        return f"http://{host}:{address[1]}"

    @property
    def is_public(self) -> bool:
        """True when others than this machine can reach it."""
        return self.settings.host not in LOOPBACK

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of an error's frames: weights among them would outlive the end."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, so that a port in use is known before a model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _no_address(f'"{host}": {_why(error)}') from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _no_address(f'"{host}"') from None
        raise SpecError(
            f"[serve] Port {port} of {host} must be free to bind: {_why(error)}. "
            "Name another port; 0 takes any free one."
        ) from None
    return sock


def _no_address(found: str) -> SpecError:
    return SpecError(
        f"[serve] The host must be an address of this machine, got {found}. "
        "127.0.0.1 is for this machine alone, 0.0.0.0 for all that reach it."
    )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
