"""An engine behind a listening socket: for the command line, and to embed in a program."""

import threading
import time
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
            )
        )
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        """Load the model and wait for it.

        Raises:
            SpecError: it cannot be served; the message says why.
        """
        self.engine.start()
        if not self.engine.wait_ready():
            error = self.engine.error
            if isinstance(error, SpecError):
                raise error
            raise SpecError(f"[serve] Loading broke off: {self.engine.problem}") from error

    def run(self) -> None:
        """Serve on this thread until a signal ends it; `load` comes first."""
        try:
            self._uvicorn.run()
        finally:
            self.engine.stop()

    def start(self) -> None:
        """Load, then serve on another thread; returns when the port listens."""
        self.load()
        self._thread = threading.Thread(target=self._uvicorn.run, name="spec-http", daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise SpecError(
                    f"[serve] Port {self.settings.port} of {self.settings.host} must be free."
                )
            time.sleep(0.01)

    def stop(self) -> None:
        """End both threads."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(_DRAIN_S + 5)
        self.engine.stop()

    @property
    def url(self) -> str:
        """Where it listens, once started."""
        address = self._uvicorn.servers[0].sockets[0].getsockname()
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
