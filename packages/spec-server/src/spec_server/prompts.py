"""From a conversation to the ids of a prompt: the model's chat template, on the HTTP side.

Nothing a client says is dropped silently: where a template would leave a system message out, it is
moved to where the template shows it, or the request is refused. Knows nothing about dialects; calls
come in on worker threads and are served one at a time.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_server.answer import Marks
from spec_server.errors import Refusal
from spec_server.guides import Grammars
from spec_server.words import Words


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, free of any dialect.

    Attributes:
        messages: As chat templates take them: "role", "content" (text), "tool_calls" with arguments
            as objects, "tool_call_id", "name", "reasoning_content".
        tools: In OpenAI's function format.
        thinking: Whether to reason; None leaves it to the template.
        continue_last: The last message is the beginning of the answer.
        effort: Passed on to templates that know `reasoning_effort`.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    continue_last: bool = False
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        ids: What the model continues.
        marks: How its answer will be split.
    """

    ids: tuple[int, ...]
    marks: Marks


class Prompter:
    """Renders and encodes for one model.

    Args:
        tokenizer: A spec_targets.HfTokenizer.
        vocab_size: V of the target.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.words = Words(tokenizer)
        self.wrapper = tokenizer.wrapper
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        template = getattr(self.words.hf, "chat_template", None)
        self.template = template if isinstance(template, str) else ""

    @property
    def think(self) -> tuple[str, str] | None:
        """Marks of the reasoning, or None."""
        if not self.wrapper.has_thinking:
            return None
        return self.wrapper.think_start, self.wrapper.think_end

    @property
    def call(self) -> tuple[str, str] | None:
        """Marks of a tool call, or None."""
        if not self.wrapper.has_tool_calling:
            return None
        return self.wrapper.tool_call_start, self.wrapper.tool_call_end

    def text(self, text: str) -> tuple[int, ...]:
        """Ids of a raw text."""
        with self._lock:
            return tuple(self.words.encode(text))

    def after_reasoning(self) -> tuple[int, ...]:
        """Ids of the mark that ends the reasoning; empty without."""
        if self.think is None:
            return ()
        with self._lock:
            return tuple(self.words.encode_bare(self.think[1]))

    def check_grammar(self, grammar: str) -> str | None:
        """What is wrong with a grammar, or None."""
        with self._lock:
            if self._grammars is None:
                stops = sorted(self.words.stop_ids)
                self._grammars = Grammars(self.words.hf, self.vocab_size, stops)
            return self._grammars.check(grammar)

    def chat(self, chat: Chat) -> Prompt:
        """Ids of a conversation, ready for the answer.

        Raises:
            Refusal: the model has no chat template, the template refuses the conversation, or it
                would leave part of it out.
        """
        if not self.wrapper.has_chat_template:
            raise Refusal(
                "[template] The model has no chat template. Use /v1/completions.", param="messages"
            )
        if chat.tools and self.call is None:
            raise Refusal(
                "[tools] The model's chat template has no tools. Leave them out.", param="tools"
            )
        with self._lock:
            text = self._render_all(chat)
            in_reasoning = self._ends_in_reasoning(text) and not chat.continue_last
            if in_reasoning and chat.thinking is False and self.think is not None:
                text, in_reasoning = f"{text.rstrip()}\n\n{self.think[1]}\n\n", False
            ids = tuple(self.words.encode_rendered(text))
        call = self.call if chat.tools else None
        return Prompt(ids, Marks(self.think, call, in_reasoning))

    # -- the template ----------------------------------------------------------------------------

    def _render_all(self, chat: Chat) -> str:
        """The first arrangement of system messages that the template shows whole."""
        messages = list(chat.messages)
        problem = ""
        for arrange in (list, _system_first, _system_in_user):
            arranged = arrange(messages)
            try:
                text = self._render(arranged, chat)
            except Exception as error:  # jinja's own errors: the template is data of the checkpoint
                problem = problem or str(error) or type(error).__name__
                continue
            if all(part in text for part in _system_texts(messages)):
                return text
            problem = problem or "it leaves out a system message"
        raise Refusal(
            f"[template] The chat template must take the messages, and does not: {problem}",
            param="messages",
        )

    def _render(self, messages: list[dict[str, Any]], chat: Chat) -> str:
        extra: dict[str, Any] = {}
        if chat.thinking is not None:
            extra["enable_thinking"] = chat.thinking
        if chat.effort is not None:
            extra["reasoning_effort"] = chat.effort
        if chat.tools:
            extra["tools"] = list(chat.tools)
        render = self.wrapper.apply_chat_template
        if chat.continue_last:
            last = messages[-1]["content"]
            text = render(messages, tokenize=False, add_generation_prompt=False, **extra)
            return text[: text.rindex(last.strip()) + len(last.strip())] if last.strip() else text
        return render(messages, tokenize=False, add_generation_prompt=True, **extra)

    def _ends_in_reasoning(self, text: str) -> bool:
        if self.think is None:
            return False
        return text.rstrip().endswith(self.think[0])


def _system_texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [m["content"].strip() for m in messages if m["role"] == "system"]


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages joined into one at the beginning."""
    rest = [m for m in messages if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(_system_texts(messages))}, *rest]


def _system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages in front of the first user message's text."""
    rest = [dict(m) for m in messages if m["role"] != "system"]
    texts = _system_texts(messages)
    for message in rest:
        if message["role"] == "user":
            message["content"] = "\n\n".join([*texts, message["content"]])
            return rest
    return [{"role": "user", "content": "\n\n".join(texts)}, *rest]
