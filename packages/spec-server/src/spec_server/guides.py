"""Structured output, reasoning budgets and token biases as guides of the loop.

The grammar engine is llguidance.

A guide walks the drafts of a block on the host, so each row of a verify is masked by what the
grammar allows after the drafts before it: speculation and grammar together stay lossless.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import llguidance
import llguidance.hf
import mlx.core as mx
import numpy as np

from spec_core import SpecError
from spec_core.guide import Guide, TokenBias
from spec_server.jobs import Ask, Budget

ANY_OBJECT = {"type": "object"}
# Room for a line break and a deep indentation. A model that has closed a text too early finds
# nothing else allowed that it wants to say, and would pad until the answer's limit.
_SPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


class Grammars:
    """Compiles grammars for one vocabulary.

    Args:
        tokenizer: A fast Hugging Face tokenizer; used only here.
        vocab_size: V of the target.
        stop_ids: Ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids)
        )
        self.vocab_size = vocab_size
        self.special = tuple(  # texts that stand for one token, so that no grammar can spell them
            text
            for text, token in tokenizer.get_added_vocab().items()
            if self._tokenizer.is_special_token(token)
        )

    def check(self, grammar: str) -> str | None:
        """What is wrong with a grammar, or None."""
        return llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer) or None

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of an answer."""
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON that satisfies a schema.

    Raises:
        ValueError: the schema cannot be written as JSON.
    """
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_bounded_space(schema)))


def with_bounded_space(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema for llguidance, with an end to the white space between two parts of its JSON."""
    return {"x-guidance": _SPACE, **schema}


def spelled_texts(schema: Any) -> Iterator[str]:
    """The texts that an answer must spell to satisfy a schema: names, constants, choices."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            for key, value in part.items():
                if key in ("const", "enum", "required"):
                    yield json.dumps(value, ensure_ascii=False)
                elif key == "properties" and isinstance(value, dict):
                    yield from value
                    left += value.values()
                else:
                    left.append(value)


class GrammarGuide:
    """Follows one answer through a grammar.

    Args:
        grammars: Of the target's vocabulary.
        grammar: What the answer must match.
        after: Ids after which the grammar begins, such as the end of the reasoning; empty begins
            at once.
    """

    fixed = False

    def __init__(self, grammars: Grammars, grammar: str, after: Sequence[int] = ()) -> None:
        self._matcher = grammars.matcher(grammar)
        self._vocab_size = grammars.vocab_size
        self._after = tuple(after)
        self._waiting = bool(after)
        self._tail: tuple[int, ...] = ()

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """0 where the grammar allows a token after the drafts before it, else -inf: (K + 1, V)."""
        rows = np.zeros((len(drafts) + 1, self._vocab_size), np.float32)
        waiting, tail, n_consumed, alive = self._waiting, self._tail, 0, True
        for i in range(len(drafts) + 1):
            if not waiting and alive:
                rows[i] = self._row()
            if i == len(drafts):
                break
            token = drafts[i]
            if waiting:
                waiting, tail = self._waits(tail, token)
            elif alive and not self._matcher.is_stopped() and rows[i, token] == 0:
                alive = self._matcher.consume_token(token)
                n_consumed += alive
            else:
                alive = False  # rejected here, so later rows are never used
        if n_consumed:
            self._matcher.rollback(n_consumed)
        return mx.array(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        for token in tokens:
            if self._waiting:
                self._waiting, self._tail = self._waits(self._tail, token)
            elif not self._matcher.is_stopped():
                self._matcher.consume_token(token)

    def _waits(self, tail: tuple[int, ...], token: int) -> tuple[bool, tuple[int, ...]]:
        tail = (*tail, token)[-len(self._after) :]
        return tail != self._after, tail

    def _row(self) -> np.ndarray:
        row = np.zeros((self._vocab_size,), np.float32)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_stopped() and not self._matcher.is_accepting():  # it would end here
            problem = self._matcher.get_error() or "it ended"
            raise SpecError(
                "[grammar] The grammar must be one that this model's tokens can follow, got: "
                f"{problem.splitlines()[0]}. Change the schema or the names of the tools."
            )
        allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(bool)
        row[: allowed.size][~allowed] = -np.inf
        row[allowed.size :] = -np.inf
        return row


class BudgetGuide:
    """Ends the reasoning once it has taken its tokens, by leaving no other choice than its mark.

    Everything else is drawn as without it.

    Args:
        budget: How much reasoning, and how the model marks it.
        vocab_size: V of the target.
    """

    fixed = False

    def __init__(self, budget: Budget, vocab_size: int) -> None:
        self._budget = budget
        self._vocab_size = vocab_size
        self._place = _Place(budget.begun)

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """-inf for all but the mark's next token where the reasoning must end: (K + 1, V)."""
        place, rows = replace(self._place), []
        for token in [*drafts, -1]:
            forced = place.forced(self._budget)
            rows.append(self._free if forced is None else self._only(forced))
            if forced is not None and token != forced:
                place.over = True  # rejected here, so later rows are never used
            place.push(token, self._budget)
        return mx.stack(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the reasoning."""
        for token in tokens:
            self._place.push(token, self._budget)

    @cached_property
    def _free(self) -> mx.array:
        return mx.zeros((self._vocab_size,))

    def _only(self, token: int) -> mx.array:
        return mx.where(mx.arange(self._vocab_size) == token, 0.0, -mx.inf)


@dataclass(slots=True)
class _Place:
    """Where an answer is in its reasoning."""

    inside: bool
    over: bool = False
    n_tokens: int = 0  # of the reasoning, its marks left out
    tail: tuple[int, ...] = ()  # newest tokens, at most a mark's length
    n_closed: int = 0  # tokens of the closing mark that were forced

    def forced(self, budget: Budget) -> int | None:
        """The token that must come next, or None."""
        if self.over or not self.inside or self.n_tokens < budget.tokens:
            return None
        return budget.end[self.n_closed]

    def push(self, token: int, budget: Budget) -> None:
        """Take in a token."""
        if self.over:
            return
        forced = self.forced(budget)
        if not self.inside:
            self.tail = (*self.tail, token)
            self.inside = self.tail == budget.start
            self.over = not self.inside and self.tail != budget.start[: len(self.tail)]
            self.tail = () if self.inside else self.tail
            return
        if forced is not None:
            self.n_closed += 1
            self.over = self.n_closed == len(budget.end)
            return
        self.n_tokens += 1
        self.tail = (*self.tail, token)[-len(budget.end) :]
        self.over = self.tail == budget.end


class AllGuides:
    """Several guides together.

    Args:
        guides: At least one.
    """

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = tuple(guides)
        self.fixed = all(guide.fixed for guide in guides)

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """The sum of all."""
        total = self._guides[0].bias(drafts)
        for guide in self._guides[1:]:
            total = total + guide.bias(drafts)
        return total

    def advance(self, tokens: Sequence[int]) -> None:
        """Let each follow."""
        for guide in self._guides:
            guide.advance(tokens)


def make_guide(grammars: Grammars | None, ask: Ask, vocab_size: int) -> Guide | None:
    """The guide of one request; None when it asks for nothing."""
    guides: list[Guide] = []
    if ask.grammar is not None and grammars is not None:
        guides.append(GrammarGuide(grammars, ask.grammar, ask.grammar_after))
    if ask.budget is not None:
        guides.append(BudgetGuide(ask.budget, vocab_size))
    if ask.biases:
        guides.append(TokenBias(dict(ask.biases), vocab_size))
    return AllGuides(guides) if len(guides) > 1 else (guides[0] if guides else None)
