"""One tokenizer for one thread: ids to text with the marks of an answer kept, ids to bytes.

Hugging Face tokenizers are not safe to use from two threads at once, so HTTP and the engine have a
copy each.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from spec_server import harmony
from spec_targets.tokenizer import with_start

_LATIN = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted."""
    letters = {chr(b): b for b in _LATIN}
    others = (b for b in range(256) if b not in _LATIN)
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


def marks_of(tokenizer: Any) -> list[str]:
    """The marks around reasoning and calls that a spec_targets.HfTokenizer knows."""
    wrapper = tokenizer.wrapper
    names = ("think_start", "think_end", "tool_call_start", "tool_call_end")
    found = [mark for name in names if (mark := getattr(wrapper, name, None))]
    if tokenizer.harmony:
        found += harmony.MARKS
    return found


class Words:
    """A tokenizer with the marks that split an answer.

    Args:
        tokenizer: A spec_targets.HfTokenizer.
        markers: Keep these marks in decoded text although they are special tokens.
    """

    def __init__(self, tokenizer: Any, markers: Sequence[str] = ()) -> None:
        self.wrapper = tokenizer.wrapper
        self._tokenizer = copy.deepcopy(tokenizer.wrapper._tokenizer)
        self.stop_ids: frozenset[int] = tokenizer.stop_ids
        shown: set[int] = set()
        for mark in markers:
            shown.update(self._tokenizer.encode(mark, add_special_tokens=False))
        self._hidden = set(self._tokenizer.all_special_ids) - shown | set(self.stop_ids) - shown

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text; the start token is added where the tokenizer wants one."""
        bos = self._tokenizer.bos_token
        special = bos is None or not text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def encode_bare(self, text: str) -> list[int]:
        """Ids of a text that already holds its special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation: its start token once, whether or not it was written."""
        return with_start(self.encode_bare(text), self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids; special tokens give nothing, marks excepted."""
        return self._tokenizer.decode(
            [t for t in tokens if t not in self._hidden],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def is_hidden(self, token: int) -> bool:
        """Whether an id gives no text: a special token that is no mark."""
        return token in self._hidden

    def token_text(self, token: int) -> str:
        """Text of one id within a text; part of a character appears as U+FFFD."""
        if token in self._added:
            return self.decode_all([token])
        return self.decode_all([*self._before, token])[self._n_before :]

    def token_bytes(self, token: int) -> list[int]:
        """Bytes of one id."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return []
        if self._byte_level and all(letter in self._bytes for letter in piece):
            return [self._bytes[letter] for letter in piece]
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:5], 16)]
        return list(self.token_text(token).encode())

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _before(self) -> list[int]:
        """Ids to stand in front of one: decoders take the space off the beginning of a text."""
        return self.encode_bare("a")

    @cached_property
    def _n_before(self) -> int:
        return len(self.decode_all(self._before))

    @property
    def hf(self) -> Any:
        """The Hugging Face tokenizer itself."""
        return self._tokenizer

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return _byte_of_letter()

    @cached_property
    def _byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in repr(getattr(backend, "decoder", ""))
