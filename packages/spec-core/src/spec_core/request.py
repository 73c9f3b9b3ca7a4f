"""A checked request: what to continue, how to draw, when to end; and its prompt, once forwarded.

Knows nothing about rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from spec_core.errors import SpecError
from spec_core.pair import Pair
from spec_core.protocols import Cache
from spec_core.sampling import Sampling
from spec_core.text import StopStrings, TextStream
from spec_core.types import TargetOutput


class Request:
    """The checked request: what to continue, how to draw, when to end."""

    def __init__(
        self,
        pair: Pair,
        prompt: str | Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop_ids: Sequence[int] | None,
        stop_strings: Sequence[str] | StopStrings,
        prefill_chunk: int,
    ) -> None:
        tokenizer = pair.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise SpecError("[generate] A text prompt needs a tokenizer. Pass ids instead.")
            prompt = tokenizer.encode(prompt)
        self.pair = pair
        self.prompt = _whole(prompt)
        self.sampling = sampling
        self.prefill_chunk = prefill_chunk
        self.max_tokens = min(max_tokens, _room(pair, self.prompt))
        if max_tokens < 1:
            raise ValueError(f"[generate] max_tokens must be >= 1, got {max_tokens}.")
        if prefill_chunk < 1:
            raise ValueError(f"[generate] prefill_chunk must be >= 1, got {prefill_chunk}.")
        if stop_ids is None:
            stop_ids = tuple(tokenizer.stop_ids) if tokenizer is not None else ()
        self.stop_ids = frozenset(stop_ids)
        self.text: TextStream | None = None
        if tokenizer is not None:
            self.text = TextStream(tokenizer.decode, stop_strings, self.prompt[-4:])
        elif stop_strings:
            raise SpecError("[generate] Stop strings need a tokenizer. Use stop_ids instead.")


def _whole(prompt: Sequence[int]) -> list[int]:
    """The ids as Python integers, whatever whole numbers they came as."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise TypeError(f"[generate] Prompt ids must be whole numbers, but {error}.") from None


def _room(pair: Pair, prompt: list[int]) -> int:
    """Tokens that can follow the prompt; refuses a prompt that cannot be continued."""
    target = pair.target
    if not prompt:
        raise SpecError("[generate] The prompt must hold at least one token, got none.")
    wrong = next((t for t in prompt if not 0 <= t < target.vocab_size), None)
    if wrong is not None:
        raise SpecError(
            f"[generate] Prompt ids must be in 0..{target.vocab_size - 1}, got {wrong}. "
            "Encode the prompt with the target's own tokenizer."
        )
    if target.context_length is None:
        return 2**63
    room = target.context_length - len(prompt)
    if room < 1:
        raise SpecError(
            f"[generate] The prompt must be shorter than the model's context of "
            f"{target.context_length} tokens, got {len(prompt)}. Shorten it."
        )
    return room


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """A prompt that has been forwarded with others'.

    Attributes:
        cache: Holds it, and nothing else.
        output: As from `prefill`.
        elapsed_s: What the forward took.
    """

    cache: Cache
    output: TargetOutput
    elapsed_s: float
