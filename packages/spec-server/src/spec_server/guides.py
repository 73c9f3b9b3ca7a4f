"""Structured output and token biases as guides of the loop. The grammar engine is llguidance.

A guide walks the drafts of a block on the host, so each row of a verify is masked by what the
grammar allows after the drafts before it: speculation and grammar together stay lossless.
"""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import mlx.core as mx
import numpy as np

from spec_core import SpecError
from spec_core.guide import Guide, TokenBias

ANY_OBJECT = {"type": "object"}


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
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


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
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            raise SpecError(f"[grammar] {self._matcher.get_error() or 'The grammar ended.'}")
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(bool)
        row[: allowed.size][~allowed] = -np.inf
        row[allowed.size :] = -np.inf
        return row


class BothGuides:
    """A grammar and a fixed bias together."""

    fixed = False

    def __init__(self, grammar: GrammarGuide, bias: TokenBias) -> None:
        self._grammar, self._bias = grammar, bias

    def bias(self, drafts: Sequence[int]) -> mx.array:
        """The sum of both."""
        return self._grammar.bias(drafts) + self._bias.bias(drafts)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the grammar."""
        self._grammar.advance(tokens)


def make_guide(
    grammars: Grammars | None,
    grammar: str | None,
    biases: Sequence[tuple[int, float]],
    vocab_size: int,
    after: Sequence[int] = (),
) -> Guide | None:
    """The guide of one request; None when it asks for nothing."""
    bias = TokenBias(dict(biases), vocab_size) if biases else None
    if grammar is None or grammars is None:
        return bias
    guide = GrammarGuide(grammars, grammar, after)
    return guide if bias is None else BothGuides(guide, bias)
