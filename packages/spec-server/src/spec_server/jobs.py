"""What passes between HTTP and the engine thread: a job down, events up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spec_calibrate import Curve
from spec_core import Cap, Pair, Sampling
from spec_core.text import StopStrings
from spec_core.types import FinishReason
from spec_server.harmony import TextStops

ENDLESS = 2**40  # the limit of an answer without one: it ends with the context


@dataclass(frozen=True, slots=True)
class Budget:
    """How long an answer may reason.

    Attributes:
        tokens: Most tokens of reasoning, its marks left out.
        start: Ids of the mark that opens it, where it is the answer's own.
        end: Ids of the mark that ends it.
        begun: The prompt has opened it.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate, free of any dialect.

    Attributes:
        prompt: Ids, at least one.
        max_tokens: Most tokens to emit; 0 only forwards the prompt, ENDLESS is no limit.
        sampling: How to draw.
        stop: Strings that end the text.
        channels: The answer comes in channels, and these strings end what the user reads of it.
        in_reasoning: The prompt has opened the reasoning.
        top_logprobs: Alternatives per token; None for no log-probabilities at all.
        score_prompt: Log-probabilities of the prompt's tokens too, with as many alternatives.
        biases: Token id -> number added to its logit.
        grammar: What the answer must match, as llguidance takes it; None for anything.
        grammar_after: Ids that the answer holds before the grammar begins, such as the end of the
            reasoning.
        budget: How long the answer may reason; None for no limit.
        max_draft: Most drafts a round; None for the server's own cap.
        by_token: Tell each token's text and origin.
        show_markers: Keep the marks of reasoning and tool calls in the text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    channels: bool = False
    in_reasoning: bool = False
    top_logprobs: int | None = None
    score_prompt: bool = False
    biases: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    grammar_after: tuple[int, ...] = ()
    budget: Budget | None = None
    max_draft: int | None = None
    by_token: bool = False
    show_markers: bool = False

    def stops(self) -> StopStrings:
        """What looks for the strings in one text of the answer."""
        if self.channels and self.stop:
            return TextStops(self.stop, in_reasoning=self.in_reasoning)
        return StopStrings(self.stop)

    @property
    def forwarded(self) -> tuple[int, ...]:
        """Ids of the prompt that go through the model: only an answer needs the last one's row."""
        return self.prompt if self.max_tokens or len(self.prompt) == 1 else self.prompt[:-1]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One emitted token.

    Attributes:
        id: Its id.
        logprob: Log-probability under the target, before temperature and penalties; None if not
            asked for.
        top: The most likely tokens as (id, log-probability), best first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text that became final with one token, and who proposed it."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt's ids that have been forwarded."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Every token of the prompt with its log-probability; the first one has none."""

    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added.

    Attributes:
        text: Text that became final.
        tokens: Its tokens, a stop token left out.
        by_token: Text by token where asked for.
    """

    text: str
    tokens: tuple[TokenInfo, ...]
    by_token: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """What a finished generation cost.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of these, tokens whose state was kept from earlier.
        completion_tokens: Emitted tokens, a stop token included.
        mode: What drafted, or "baseline".
        acceptance_length: Mean tokens per round; 1.0 = no gain.
        drafted: Drafts sent to verify.
        accepted: Drafts accepted.
        tokens_per_second: Decoding only.
        time_to_first_token: Seconds since the request was queued.
        max_draft: Most drafts a round that the request was given; "auto" for a cap that adapts.
        notices: What was done otherwise than asked for, in words.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    mode: str
    acceptance_length: float
    drafted: int
    accepted: int
    tokens_per_second: float
    time_to_first_token: float
    max_draft: int | str = 0
    notices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The object that responses carry as `x_spec`."""
        return {
            "mode": self.mode,
            "max_draft": self.max_draft,
            "acceptance_length": round(self.acceptance_length, 4),
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "time_to_first_token": round(self.time_to_first_token, 4),
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a generation that went well."""

    reason: FinishReason
    stop_string: str | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class Failure:
    """The last event of a generation that did not."""

    message: str
    status: int = 500


Event = Progress | Scored | Piece | End | Failure


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine's hands. `cancel` may be called from any thread."""

    ask: Ask
    sink: Callable[[Event], None]
    queued_at: float = field(default_factory=time.perf_counter)
    cancelled: bool = False

    def cancel(self) -> None:
        """Give up; the engine drops it before its next round."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves.

    Attributes:
        pair: Target, drafter and a Hugging Face tokenizer.
        model: The model's name in answers.
        mode: The mode that really runs; "baseline" without a drafter.
        make_cap: From a request's own limit of drafts (None: no wish) to the cap of its rounds.
        fingerprint: Names weights and settings, so that no state is used with others.
        row_costs: Seconds of a verify by block width, for a number of sequences that share it;
            called on the engine thread. Measured anew without.
    """

    pair: Pair
    model: str
    mode: str
    make_cap: Callable[[int | None], Cap]
    fingerprint: str = ""
    row_costs: Callable[[int], Curve | None] | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    low, high = 0, n  # a[:low] equal, a[:high] different
    while high - low > 1:
        middle = (low + high) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle
    return low
