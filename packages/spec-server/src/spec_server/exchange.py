"""One HTTP request and its generations: events from the engine thread, until the client leaves."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request

from spec_server.engine import Engine
from spec_server.errors import Refusal
from spec_server.jobs import Ask, End, Event, Failure, Job

_WATCH_S = 1.0  # how often a silent engine is looked at


class _Mailbox:
    """Carries events from the engine thread to one event loop.

    A wake-up costs more than a token's share of a round, so one serves all events that are there
    by the time the loop has woken up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._awake = False  # the loop has been told and has not looked yet

    def put(self, take: Callable[[Any], None], item: Any, *, wake: bool) -> None:
        """Have `take(item)` called on the loop; from any thread, in order."""
        self._items.append((take, item))
        if wake and not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: each sender is to hear of it
                self._awake = False
                raise

    def _deliver(self) -> None:
        self._awake = False  # first, so that nothing that comes now is left lying
        while self._items:
            take, item = self._items.popleft()
            take(item)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Broken(Exception):
    """A generation broke off.

    Args:
        index: Which one.
        failure: Why.
    """

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure.message)
        self.index = index
        self.failure = failure

    def as_refusal(self) -> Refusal:
        """What the client is told."""
        return Refusal(self.failure.message, status=self.failure.status)


class Exchange:
    """The generations of one request, all queued at once.

    Args:
        engine: Who generates.
        asks: One per answer.
        request: To notice when its client leaves.
        stream: Whether each event is wanted at once; else only the last one wakes anybody.

    Raises:
        Refusal: one of them was not taken; then none is.
    """

    def __init__(
        self, engine: Engine, asks: Sequence[Ask], request: Request, *, stream: bool
    ) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.asks = tuple(asks)
        self._engine = engine
        self._request = request
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
        self._stream = stream
        self._jobs: list[Job] = []
        try:
            for i, ask in enumerate(asks):
                self._jobs.append(engine.submit(ask, partial(self._arrive, i)))
        except Refusal:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop whatever still runs."""
        for job in self._jobs:
            job.cancel()

    async def events(
        self, silence_s: float | None = None
    ) -> AsyncIterator[tuple[int, Event] | None]:
        """Events of all generations until each has ended.

        Args:
            silence_s: Yield None whenever nothing came for so long.

        Raises:
            ClientGone: the client closed the connection.
            Broken: a generation broke off.
        """
        left = len(self._jobs)
        gone = asyncio.ensure_future(_disconnected(self._request))
        last = time.monotonic()
        try:
            while left:
                item = await self._next(gone, silence_s)
                if item is not None:
                    index, event = item
                    if isinstance(event, Failure):
                        raise Broken(index, event)
                    left -= isinstance(event, End)
                    last = time.monotonic()
                    yield item
                elif silence_s is not None and time.monotonic() - last >= silence_s:
                    last = time.monotonic()
                    yield None
        finally:
            gone.cancel()
            self.cancel()

    async def _next(
        self, gone: asyncio.Future[Any], silence_s: float | None
    ) -> tuple[int, Event] | None:
        """The next event, or None after a while."""
        if not self._events.empty():
            return self._events.get_nowait()
        getter = asyncio.ensure_future(self._events.get())
        wait_s = _WATCH_S if silence_s is None else min(silence_s, _WATCH_S)
        try:
            await asyncio.wait({getter, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
        finally:
            if not getter.done():
                getter.cancel()
        if gone.done():
            raise ClientGone
        if not self._engine.alive and self._events.empty():
            return 0, Failure(f"The engine ended: {self._engine.describe()}", 503)
        return None

    def _arrive(self, index: int, event: Event) -> None:
        """Called on the engine thread."""
        wake = self._stream or isinstance(event, End | Failure)
        self._mailbox.put(self._events.put_nowait, (index, event), wake=wake)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone. The body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
