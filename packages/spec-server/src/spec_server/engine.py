"""The engine thread: loads the pair, takes jobs, steps the batch, tells each job what came of it.

Everything that touches MLX happens on this one thread. A job that fails is told so and dropped; an
error outside any job drops all running ones and starts a fresh batch. Knows nothing about HTTP.
"""

import gc
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

import mlx.core as mx

from spec_calibrate import CapController, RowCurves
from spec_core import NumericsError, Round, SpecError
from spec_core.batch import Batch
from spec_core.lending import Lender
from spec_core.protocols import Bounded, DraftsTogether
from spec_server.crowd import CrowdCap
from spec_server.disk import DiskTier, open_disk_tier
from spec_server.errors import PromptTooLong, Refusal
from spec_server.jobs import ENDLESS, Ask, End, Event, Failure, Job, Progress, Served
from spec_server.metrics import Metrics
from spec_server.prefix import RUNG_SHARE, PrefixCache
from spec_server.running import Generation, Machinery
from spec_server.settings import Settings
from spec_targets.batching import power_of_two
from spec_targets.snapshot import rebuilt

_log = logging.getLogger("spec_server")
_DRAFT_MORE = 0.25  # of a draft's time for each row more that drafts together; rounds correct it
_IDLE_S = 0.25  # how often an idle engine looks whether it should stop

Status = Literal["loading", "ok", "failed", "stopped"]


class Engine:
    """One loaded pair and the requests it works on.

    Args:
        load: Loads what is served; called on the engine thread.
        settings: Limits.
        metrics: Where counts go.
    """

    def __init__(self, load: Callable[[], Served], settings: Settings, metrics: Metrics) -> None:
        self._load = load
        self.settings = settings
        self.metrics = metrics
        self.status: Status = "loading"
        self.problem = ""
        self.error: Exception | None = None  # why loading ended, if it did
        self.served: Served | None = None
        self.batch_refusal: str | None = None
        self.machinery: Machinery | None = None
        self.prefix: PrefixCache | None = None
        self.crowd = CrowdCap(0)
        self._arrived: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: list[Generation] = []
        self._lock = threading.Lock()
        self._n_waiting = 0
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._kv_per_token = 0.0
        self._batch: Batch | None = None
        self._thread = threading.Thread(target=self._main, name="spec-engine", daemon=True)

    # -- from any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until loading ended, well or not; True when the engine serves."""
        self._ready.wait(timeout_s)
        return self.status == "ok"

    def stop(self, timeout_s: float = 30.0) -> None:
        """Tell running requests that the server ends, and end the thread."""
        self._stop.set()
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():  # weights that outlive the interpreter's end make it abort
            self._batch = self.machinery = self.prefix = self.served = None
            gc.collect()

    @property
    def alive(self) -> bool:
        """True while the thread serves."""
        return self.status == "ok" and self._thread.is_alive()

    @property
    def n_running(self) -> int:
        """Requests being worked on."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait."""
        return self._n_waiting

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together."""
        return self.served.pair.target.context_length if self.served is not None else None

    def submit(self, ask: Ask, sink: Callable[[Event], None]) -> Job:
        """Queue a request. Events come from the engine thread, `End` or `Failure` last.

        Raises:
            Refusal: the engine does not serve, the queue is full, or the prompt is too long.
        """
        if not self.alive:
            raise Refusal(f"[engine] The engine is not serving: {self.describe()}", status=503)
        self._check_room(ask)
        job = Job(ask, sink)
        with self._lock:
            busy = self._n_waiting - max(self.settings.max_batch - len(self._running), 0)
            if busy >= self.settings.max_queue:
                raise Refusal(
                    f"[queue] At most {self.settings.max_queue} requests may wait. Try again soon.",
                    status=429,
                    code="rate_limit_exceeded",
                )
            self._n_waiting += 1
        self.metrics.queue.set(self._n_waiting)
        self._arrived.put(job)
        return job

    def describe(self) -> str:
        """The state in words."""
        if self.status == "ok" and not self._thread.is_alive():
            return "its thread ended"
        return self.problem or {"loading": "the model is being loaded"}.get(
            self.status, self.status
        )

    def _check_room(self, ask: Ask) -> None:
        context = self.context_length
        if context is not None and len(ask.forwarded) >= context:
            raise PromptTooLong(len(ask.prompt), context)
        budget = self.settings.kv_bytes
        if budget is not None and self._kv_per_token * len(ask.prompt) > budget:
            raise PromptTooLong(len(ask.prompt), int(budget / self._kv_per_token))

    # -- the engine thread -----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._work()
        finally:
            mx.clear_streams()  # else a process that has computed on CUDA aborts at its end

    def _work(self) -> None:
        try:
            self._open()
        except Exception as error:
            self.error = error
            self.status, self.problem = "failed", str(error) or type(error).__name__
            if not isinstance(error, SpecError):
                _log.exception("[engine] Loading broke off.")
            self._ready.set()
            return
        self.status = "ok"
        self._ready.set()
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:
            self.problem = f"{type(error).__name__}: {error}"
            self.status = "failed"
            _log.exception("[engine] The engine thread ended.")
        else:
            self.status = "stopped"
            if self.prefix is not None:
                self.prefix.write_all()
        self._refuse_all("The server is shutting down.", 503)

    def _open(self) -> None:
        served = self._load()
        self.served = served
        self.machinery = Machinery(served, self.metrics)
        self.prefix = PrefixCache(
            served.pair.target, self.settings.prefix_bytes, self._open_disk(served)
        )
        self.metrics.cache_budget.set(self.settings.prefix_bytes)
        self._lender = Lender(served.pair.drafter) if served.pair.drafter is not None else None
        self.crowd = _crowd_of(served)
        self._batch = self._new_batch()
        self.batch_refusal = self._batch.refusal
        self._kv_per_token = _kv_per_token(served)

    def _open_disk(self, served: Served) -> DiskTier | None:
        folder = self.settings.prefix_dir
        if folder is None or not self.settings.prefix_bytes:
            return None
        return open_disk_tier(folder, self.settings.prefix_disk_bytes, served, rebuilt)

    def _new_batch(self) -> Batch:
        assert self.served is not None
        share = self.settings.max_batch > 1
        return Batch(self.served.pair.target, share=share, crowd=self.crowd)

    def _turn(self) -> None:
        """Take what arrived, then one step of the batch."""
        self._take(block=not self._running and not self._waiting)
        self._drop_cancelled()
        self._admit()
        if not self._running:
            if self.prefix is not None:
                self.prefix.write_one()
            return
        assert self._batch is not None
        try:
            outcomes = self._batch.step()
        except Exception as error:
            self._start_over(error)
            return
        self.metrics.width.set(self._batch.width)
        self.metrics.saw([outcome for _, outcome in outcomes if isinstance(outcome, Round)])
        for row, outcome in outcomes:
            self._deliver(row.tag, outcome)

    def _take(self, block: bool) -> None:
        try:
            while True:
                job = self._arrived.get(timeout=_IDLE_S) if block else self._arrived.get_nowait()
                block = False
                if job is not None:
                    self._waiting.append(job)
        except queue.Empty:
            return

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._count_waiting(-1)
            self.metrics.requests.labels("cancelled").inc()
        for generation in [g for g in self._running if g.job.cancelled]:
            _log.info(
                "[engine] The client left after %d tokens; its state is kept.",
                generation.n_emitted,
            )
            self._retire(generation, keep=True)
            self.metrics.requests.labels("cancelled").inc()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.settings.max_batch:
            job = self._waiting[0]
            if self._running and not self._fits(job.ask):
                return
            self._waiting.popleft()
            self._count_waiting(-1)
            self._begin(job)

    def _fits(self, ask: Ask) -> bool:
        """Whether the caches of all running requests and of this one stay inside the budget.

        In a shared forward each is as large as the longest, for as many as the next power of two.
        """
        budget = self.settings.kv_bytes
        if budget is None:
            return True
        asks, context = [ask, *(g.job.ask for g in self._running)], self.context_length or ENDLESS
        sizes = [min(len(a.prompt) + a.max_tokens, context) for a in asks]
        shared = max(sizes) * power_of_two(len(sizes))
        n_tokens = shared if self.batch_refusal is None else sum(sizes)
        return n_tokens * self._kv_per_token <= budget

    def _begin(self, job: Job) -> None:
        assert self._batch is not None and self.machinery is not None and self.prefix is not None
        try:
            drafter = self._lender.lend() if self._lender is not None else None
            # A prompt that is scored is forwarded whole, so its figures never depend on the cache.
            score = job.ask.score_prompt
            hit = None if score else self.prefix.fetch(job.ask.forwarded, drafter)
            if hit is not None:
                self.metrics.cache_hits.labels(hit.tier).inc()
                job.sink(Progress(hit.n_tokens, len(job.ask.forwarded)))
            else:
                self.metrics.cache_misses.inc()
            rung_bytes = self.prefix.budget // RUNG_SHARE if self.prefix.enabled else 0
            generation = self.machinery.begin(
                job, self._batch, drafter, hit, self.settings.prefill_chunk, rung_bytes
            )
            self._running.append(generation)
        except Exception as error:
            self._fail(job, error)

    def _deliver(self, generation: Generation, outcome: Round | Exception) -> None:
        if isinstance(outcome, Exception):
            self._retire(generation, keep=False)
            self._fail(generation.job, outcome)
            return
        try:
            events = generation.take(outcome)
        except Exception as error:
            self._retire(generation, keep=False)
            self._fail(generation.job, error)
            return
        if outcome.finish_reason is not None:
            self._retire(generation, keep=True)
            self.metrics.requests.labels(outcome.finish_reason).inc()
        for event in events:
            self._tell(generation.job, event)

    def _retire(self, generation: Generation, *, keep: bool) -> None:
        """Take a generation out of the batch, keeping its state for later prompts."""
        assert self._batch is not None and self.prefix is not None
        if generation in self._running:
            self._running.remove(generation)
        try:
            cache = self._batch.remove(generation.row, keep=keep and self.prefix.enabled)
            if keep and self._lender is not None and generation.drafter is not None:
                self._lender.take_back(generation.drafter)
            if keep and self.prefix.enabled:
                self.prefix.store(*generation.state(cache))
                self.metrics.cache_bytes.set(self.prefix.nbytes)
        except Exception:
            _log.exception("[engine] A state could not be kept.")

    def _start_over(self, error: Exception) -> None:
        """The batch itself broke: nothing in it can be trusted."""
        _log.exception("[engine] A step broke off.", exc_info=error)
        broken, self._running = self._running, []
        self._batch = self._new_batch()
        for generation in broken:
            self._fail(generation.job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        self.metrics.requests.labels("error").inc()
        known = isinstance(error, SpecError | ValueError)
        refused = known and not isinstance(error, NumericsError)
        if not known:
            _log.error("[engine] A generation broke off.", exc_info=error)
        self._tell(job, Failure(f"{error}" or type(error).__name__, 400 if refused else 500))

    def _tell(self, job: Job, event: Event) -> None:
        try:
            job.sink(event)
        except Exception:  # its event loop is gone
            job.cancel()

    def _refuse_all(self, message: str, status: int) -> None:
        self._take(block=False)
        jobs = [*self._waiting, *(g.job for g in self._running)]
        self._waiting.clear()
        self._running.clear()
        for job in jobs:
            self._tell(job, Failure(message, status))

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self._n_waiting += change
        self.metrics.queue.set(self._n_waiting)


def _crowd_of(served: Served) -> CrowdCap:
    """What decides about drafting in shared rounds, with costs measured when a width comes up."""
    most = served.pair.max_draft
    widest = served.make_cap(most)
    if most == 0 or (isinstance(widest, Bounded) and widest.most == 0):  # no request can draft
        return CrowdCap(0)
    costs = served.row_costs or RowCurves(served.pair.target, most + 1, taps=served.pair.taps)
    cap = served.make_cap(None)
    if not isinstance(cap, CapController):
        return CrowdCap(most, costs)
    curves, more = cap.curves, _DRAFT_MORE if _draft_together(served) else 1.0

    def draft_s(n_rows: int, n_drafts: int) -> float:
        return curves.draft_s(n_drafts, curves.source) * (1.0 + more * (n_rows - 1))

    return CrowdCap(most, costs, draft_s)


def _draft_together(served: Served) -> bool:
    """Whether drafters as rows get them do: one that cannot be forked is used by turns."""
    if served.pair.drafter is None:
        return False
    drafter = Lender(served.pair.drafter).lend()
    return isinstance(drafter, DraftsTogether) and drafter.kin is not None


def _kv_per_token(served: Served) -> float:
    """Bytes of cache per token, by a short prompt that fills a cache's first allocation."""
    target = served.pair.target
    cache = target.make_cache()
    target.prefill([1, 2, 3, 4, 5, 6, 7, 8], cache)
    return cache.nbytes / 256


__all__ = ["End", "Engine", "Status"]
