"""A conversation: messages, and the target's cache kept from turn to turn. Prints nothing.

Every turn encodes the whole conversation with the chat template and goes on from the longest run of
ids that an earlier state stands for, so a template that drops old reasoning still gets exact input.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from spec_cli.channels import Channels, marked
from spec_core import Cap, Pair, Sampling, SpecError, Stats, StatsMeter, generate
from spec_server.prefix import PrefixCache

_MOST_STATES = 2  # the newest answer's, and the one at its prompt's end for templates that cut it


class TurnError(Exception):
    """One turn was refused; the conversation is as it was before. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of one answer.

    Attributes:
        stats: Of its generation.
        prompt_tokens: Ids of the whole conversation up to the answer.
        reused_tokens: Those of them that an earlier turn had forwarded already.
    """

    stats: Stats
    prompt_tokens: int
    reused_tokens: int


class Conversation:
    """Messages and states of one chat.

    Args:
        pair: Target, drafter and a tokenizer with `encode_chat` and `harmony`.
        cap: Shared by all turns, since it learns from text to text.
        system: System message, if any.
        template_args: Variables of the chat template.
        settings: Arguments of `spec_core.generate`: max_tokens, stop_strings.
        sampling: How to draw; a seed is raised by one each turn.
    """

    def __init__(
        self,
        pair: Pair,
        cap: Cap,
        *,
        system: str | None,
        template_args: dict[str, Any],
        sampling: Sampling,
        settings: dict[str, Any],
    ) -> None:
        self.pair = pair
        tokenizer: Any = pair.tokenizer
        self._marked = marked(pair) if tokenizer.harmony else None  # for answers in channels
        self.cap = cap
        self.stopping = False  # set it, from a signal handler too, to end the answer after a round
        self.turns: list[Turn] = []
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._template_args = template_args
        self._sampling = sampling
        self._settings = settings
        self._kept = PrefixCache(pair.target, sys.maxsize)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        return list(self._messages)

    def clear(self) -> None:
        """Start afresh, with the same system message."""
        self._messages = list(self._opening)

    def answer(self, text: str) -> Iterator[str]:
        """Answer one message, piece by piece; a stopped answer stays as far as it came.

        Raises:
            TurnError: the conversation is too long, or the template or the target refuses it.
        """
        self.stopping = False
        messages = [*self._messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        channels = None if self._marked is None else Channels()
        try:
            for piece in self._generate(messages, channels):
                pieces.append(piece)
                yield piece
        except SpecError as error:
            raise TurnError(str(error)) from error
        said = "".join(pieces) if channels is None else channels.text
        if pieces and (channels is None or said):  # ended before anything was said: never asked
            self._messages = [*messages, {"role": "assistant", "content": said}]

    def _generate(self, messages: list[dict[str, str]], channels: Channels | None) -> Iterator[str]:
        tokenizer: Any = self.pair.tokenizer
        prompt = tokenizer.encode_chat(messages, **self._template_args)
        cache, n_reused = self._go_on_from(prompt)
        meter, ids = StatsMeter(), list(prompt)
        rounds = generate(
            self._marked or self.pair,
            prompt,
            sampling=self._seeded(),
            cap=self.cap,
            cache=cache,
            on_prefill=self._between_chunks,
            **self._settings,
        )
        try:
            for round_ in rounds:
                meter.add(round_)
                ids += round_.tokens
                if round_.kind == "prefill":
                    self._keep(ids, cache)
                yield round_.text if channels is None else channels.push(round_)
                if self.stopping:
                    break
        except _Stopped:
            pass
        rounds.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._keep(ids, cache)
        self.turns.append(Turn(meter.result(), len(prompt), n_reused))

    def _go_on_from(self, prompt: list[int]) -> tuple[Any, int]:
        """A cache for the prompt, the drafter set to it, and how many ids it stands for."""
        hit = self._kept.fetch(prompt, self.pair.drafter)
        if hit is not None:
            return hit.cache, hit.n_tokens
        if self.pair.drafter is not None:
            self.pair.drafter.reset()
        return self.pair.target.make_cache(), 0

    def _keep(self, ids: list[int], cache: Any) -> None:
        """A copy of the state, for later turns."""
        n, drafter = cache.offset, self.pair.drafter
        drafts = {n: drafter.state()} if drafter is not None and drafter.taps else {}
        self._kept.store(ids[:n], cache, drafts)
        del self._kept.entries[:-_MOST_STATES]

    def _between_chunks(self, done: int, total: int) -> None:
        if self.stopping and done < total:
            raise _Stopped

    def _seeded(self) -> Sampling:
        seed = self._sampling.seed
        if seed is None:
            return self._sampling
        return replace(self._sampling, seed=seed + len(self.turns))


class _Stopped(Exception):
    """The user stopped the answer before its first token."""
