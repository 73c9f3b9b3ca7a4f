"""What a generation needs: a target, a drafter if there is one, a tokenizer if text is wanted."""

from dataclasses import dataclass

from spec_core.protocols import Drafter, Target, Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with the drafter that proposes for it.

    Attributes:
        target: The model whose output is produced.
        drafter: None decodes plainly.
        tokenizer: None works on ids alone: prompts are ids, rounds carry no text.
    """

    target: Target
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None
