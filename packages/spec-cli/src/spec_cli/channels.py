"""Answers in gpt-oss's channels, shown as other models write theirs: `<think>` marks, then text.

The server's splitter tells the channels apart. Prints nothing.
"""

from dataclasses import replace
from typing import Any

from spec_core import Pair, Round
from spec_server.harmony import MARKS, Harmony
from spec_server.words import Words


def marked(pair: Pair) -> Pair:
    """The pair with the marks of the channels kept in its text, for `Channels` to read."""
    tokenizer: Any = pair.tokenizer
    return replace(pair, tokenizer=Words(tokenizer, MARKS))


class Channels:
    """One answer of a marked pair.

    Attributes:
        text: What was said so far, without the reasoning.
    """

    def __init__(self) -> None:
        self.text = ""
        self._splitter = Harmony()
        self._reasons = False

    def push(self, round_: Round) -> str:
        """What a user sees of a round."""
        parts = self._splitter.push(round_.text)
        if round_.finish_reason is not None:
            parts += self._splitter.finish()
        shown = ""
        for part in parts:
            reasons, text = part.kind == "reasoning", part.text
            if reasons and not self._reasons:
                shown += ("\n\n" if self.text else "") + "<think>\n"
                text = text.lstrip()
            elif self._reasons and not reasons:
                shown += "\n</think>\n\n"
                text = text.lstrip("\n")
            self._reasons = reasons
            shown += text
            self.text += "" if reasons else part.text
        return shown
