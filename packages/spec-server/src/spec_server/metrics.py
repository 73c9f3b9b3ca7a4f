"""Counters, gauges and histograms in Prometheus' text format, one registry per server."""

from collections import Counter as Counts
from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spec_core import Round

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "spec_requests", "Generations by outcome.", ["outcome"], registry=registry
        )
        self.responses = Counter(
            "spec_http_responses", "HTTP responses.", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter("spec_prompt_tokens", "Prompt tokens.", registry=registry)
        self.cached_tokens = Counter(
            "spec_prompt_tokens_cached", "Prompt tokens whose state was kept.", registry=registry
        )
        self.tokens = Counter("spec_completion_tokens", "Emitted tokens.", registry=registry)
        self.drafted = Counter("spec_drafted_tokens", "Drafts sent to verify.", registry=registry)
        self.accepted = Counter("spec_accepted_tokens", "Drafts accepted.", registry=registry)
        self.rounds = Counter("spec_rounds", "Rounds by kind.", ["kind"], registry=registry)
        self.cache_hits = Counter(
            "spec_prefix_cache_hits",
            "Prompts that found a kept state.",
            ["tier"],
            registry=registry,
        )
        self.cache_misses = Counter(
            "spec_prefix_cache_misses", "Prompts that found none.", registry=registry
        )
        self.cache_bytes = Gauge(
            "spec_prefix_cache_bytes", "Bytes of kept states in memory.", registry=registry
        )
        self.cache_budget = Gauge(
            "spec_prefix_cache_budget_bytes", "Most bytes of kept states.", registry=registry
        )
        self.queue = Gauge("spec_queue_length", "Requests that wait.", registry=registry)
        self.width = Gauge(
            "spec_batch_width", "Sequences that share a forward now.", registry=registry
        )
        self.cap = Gauge("spec_cap", "Most drafts of the latest round.", registry=registry)
        self.parked = Gauge(
            "spec_parked_share", "Share of the latest 256 rounds without drafts.", registry=registry
        )
        self.acceptance = Histogram(
            "spec_acceptance_length",
            "Mean tokens per round of a generation.",
            buckets=_LENGTHS,
            registry=registry,
        )
        self.first_token = Histogram(
            "spec_time_to_first_token_seconds",
            "From being queued to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "spec_time_per_token_seconds",
            "Decoding time per token of a generation.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._plain: deque[bool] = deque(maxlen=256)

    def saw(self, rounds: Sequence[Round]) -> None:
        """Count what one step of the batch brought: a counter costs a share of a row's step."""
        self.tokens.inc(sum(len(round_.tokens) for round_ in rounds))
        decoded = [round_ for round_ in rounds if round_.kind != "prefill"]
        if not decoded:
            return
        for kind, n in Counts(round_.kind for round_ in decoded).items():
            self.rounds.labels(kind).inc(n)
        self.drafted.inc(sum(round_.n_drafted for round_ in decoded))
        self.accepted.inc(sum(round_.n_accepted for round_ in decoded))
        self.cap.set(decoded[-1].n_drafted)
        self._plain += [round_.n_drafted == 0 for round_ in decoded]
        self.parked.set(sum(self._plain) / len(self._plain))

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
