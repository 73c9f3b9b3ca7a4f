"""From a conversation to the ids of a prompt: the model's chat template, on the HTTP side.

Nothing a client says is dropped silently: where a template would leave a system message out, it is
moved to where the template shows it, or the request is refused. The one exception is a line of
Claude Code's that is no message (`_addressed`). Knows nothing about dialects; calls come in on
worker threads and are served one at a time.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spec_server import harmony
from spec_server.answer import Marks
from spec_server.calls import CallSyntax, call_grammar, term
from spec_server.errors import PromptTooLong, Refusal
from spec_server.guides import Grammars, schema_grammar, spelled_texts
from spec_server.jobs import Budget
from spec_server.words import Words, marks_of
from spec_targets.tokenizer import FINAL

_LONG = 8  # characters per token of the context, beyond which a text is not encoded at once
_SEAM = 64  # tokens that a cut in a text may add
_ARGUMENTS = "[ARGS]"  # in newer Mistral vocabularies, between a call's name and its arguments
_SET_HERE = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
    "chat_template", "conversation", "bos_token", "eos_token", "raise_exception", "strftime_now",
}  # fmt: skip
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_BARE_CALL = '{"name": function name, "parameters": dictionary of argument name and its value}'


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
        must_call: Tools of which one must be called; empty leaves it to the model.
        one_call: No more than one call.
        schema: What an answer must satisfy that is no call.
        variables: Further variables of the template, by name.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    continue_last: bool = False
    effort: str | None = None
    must_call: tuple[str, ...] = ()
    one_call: bool = False
    schema: dict[str, Any] | None = None
    variables: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        ids: What the model continues.
        marks: How its answer will be split.
        grammar: What the answer must match; None for anything.
    """

    ids: tuple[int, ...]
    marks: Marks
    grammar: str | None = None


class Prompter:
    """Renders and encodes for one model.

    Args:
        tokenizer: A spec_targets.HfTokenizer.
        vocab_size: V of the target.
        context: Most tokens of prompt and answer together; None for no limit.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, context: int | None = None) -> None:
        self.words = Words(tokenizer, marks_of(tokenizer))
        self.wrapper = tokenizer.wrapper
        self.harmony: bool = tokenizer.harmony
        self.vocab_size = vocab_size
        self._context = context
        self._lock = threading.Lock()
        template = getattr(self.words.hf, "chat_template", None)
        self.template = template if isinstance(template, str) else ""

    @property
    def think(self) -> tuple[str, str] | None:
        """Marks of the reasoning, or None."""
        if self.harmony:
            return harmony.THINK
        if not self.wrapper.has_thinking:
            return None
        return self.wrapper.think_start, self.wrapper.think_end

    @property
    def call(self) -> tuple[str, str] | None:
        """Marks of a tool call, or None."""
        if self.harmony and "tools" in self.template:
            return harmony.CALL
        if not self.wrapper.has_tool_calling:
            return None
        return self.wrapper.tool_call_start, self.wrapper.tool_call_end

    @property
    def bare_calls(self) -> bool:
        """Whether a call is an object without marks, as the template of Llama 3 asks for."""
        return self.call is None and _BARE_CALL in self.template

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How calls are written, where that can be put into a grammar."""
        if self.bare_calls:
            return CallSyntax("bare")
        parser = getattr(self.wrapper.tool_parser, "__module__", "").rpartition(".")[2]
        if self.call is None or parser not in ("json_tools", "mistral"):
            return None
        start, end = self.call
        if parser == "json_tools":
            return CallSyntax("tagged", (self._term(start), self._term(end)))
        if _ARGUMENTS in self.words.hf.get_vocab():
            return CallSyntax("header", (self._term(start), self._term(_ARGUMENTS)))
        return CallSyntax("list", (self._term(start),))

    def _term(self, mark: str) -> str:
        return term(mark, self.words.encode_bare(mark))

    def text(self, text: str) -> tuple[int, ...]:
        """Ids of a raw text.

        Raises:
            PromptTooLong: it has far more of them than the context.
        """
        with self._lock:
            return self._ids(text, self.words.encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens as they are spelled."""
        with self._lock:
            return self.words.decode_all(ids)

    def after_reasoning(self) -> tuple[int, ...]:
        """Ids of the mark that ends the reasoning; empty without."""
        if self.think is None:
            return ()
        with self._lock:
            return tuple(self.words.encode_bare(self.think[1]))

    def budget(self, n_tokens: int, marks: Marks) -> Budget:
        """So many tokens of reasoning, for an answer with these marks."""
        assert marks.think is not None
        with self._lock:
            start, end = (tuple(self.words.encode_bare(mark)) for mark in marks.think)
        return Budget(n_tokens, start, end, marks.in_reasoning)

    def check_grammar(self, grammar: str) -> str | None:
        """What is wrong with a grammar, or None."""
        with self._lock:
            return self._compiler.check(grammar)

    @cached_property
    def _compiler(self) -> Grammars:
        return Grammars(self.words.hf, self.vocab_size, sorted(self.words.stop_ids))

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
        if chat.tools and self.call is None and not self.bare_calls:
            raise Refusal(
                "[tools] The model's chat template has no tools. Leave them out.", param="tools"
            )
        with self._lock:
            self._check_texts(chat)
            self._check_variables(chat)
            text = self._render_all(chat)
            in_reasoning = self._ends_in_reasoning(text) and not chat.continue_last
            if in_reasoning and chat.thinking is False and self.think is not None:
                text, in_reasoning = f"{text.rstrip()}\n\n{self.think[1]}\n\n", False
            if self.harmony and chat.thinking is False and not (chat.tools or chat.continue_last):
                text += FINAL
            ids = self._ids(text, self.words.encode_rendered)
            grammar = self._grammar(chat)
        call = self.call if chat.tools else None
        bare = bool(chat.tools) and self.bare_calls
        marks = Marks(self.think, call, in_reasoning, bare, self.harmony)
        return Prompt(ids, marks, grammar)

    def _ids(self, text: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        """Encode; megabytes take minutes, in which nobody else's prompt is encoded."""
        context = self._context
        if context is not None and len(text) > _LONG * context:
            n_least = len(self.words.encode_bare(text[: _LONG * context])) - _SEAM
            if n_least >= context:
                raise PromptTooLong(n_least, context)
        return tuple(encode(text))

    def _check_texts(self, chat: Chat) -> None:
        """See that tools are told apart, and that nothing an answer must spell ends or splits it.

        Raises:
            Refusal: two tools have one name, or a text holds one of the model's special tokens.
        """
        names = [tool["function"]["name"] for tool in chat.tools]
        for name, n in Counter(names).items():
            if n > 1:
                raise Refusal(
                    f'"tools" must have a name each, got "{name}" twice. Give each its own.',
                    param="tools",
                )
            self._check_text(name, f'the tool "{name}"', "tools")
        if chat.schema is not None:
            for text in spelled_texts(chat.schema):
                self._check_text(text, f"the schema's {text}", "response_format")
        for tool in chat.tools if chat.must_call or chat.schema is not None else ():
            name = tool["function"]["name"]
            for text in spelled_texts(tool["function"].get("parameters")):
                self._check_text(text, f'{text} of the tool "{name}"', "tools")

    def _check_variables(self, chat: Chat) -> None:
        """See that the template reads them: what it never looks at would silently do nothing.

        Raises:
            Refusal: it does not, or the server sets them itself.
        """
        for name, _ in chat.variables:
            known = name.isidentifier() and re.search(rf"\b{name}\b", self.template)
            if name in _SET_HERE or not known:
                raise Refusal(
                    f'"chat_template_kwargs" must name variables of the model\'s chat template, '
                    f'got "{name[:80]}". Leave it out.',
                    param="chat_template_kwargs",
                )

    def _check_text(self, text: str, where: str, param: str) -> None:
        if not self._added.search(text):
            return
        for token in self._compiler.special:
            if token in text:
                raise Refusal(
                    f"[{param}] What is to be written must not hold special tokens of the model, "
                    f'got "{token}" in {where[:200]}. Change it.',
                    param=param,
                )

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Any added token: some vocabularies have thousands, and a schema as many texts."""
        tokens = [re.escape(t) for t in self.words.hf.get_added_vocab() if t.strip()]
        return re.compile("|".join(tokens) or "(?!)")

    def _grammar(self, chat: Chat) -> str | None:
        """What the answer must match: a shape, calls, or either."""
        if not chat.tools or not (chat.must_call or chat.schema is not None):
            return schema_grammar(chat.schema) if chat.schema is not None else None
        syntax = self.call_syntax
        if syntax is None:
            raise Refusal(
                "[tools] A call in this model's syntax can be neither forced nor put beside a "
                'shape of the answer. Set "tool_choice" to "auto" or "none", and leave one of '
                '"tools" and "response_format" out.',
                param="tool_choice" if chat.must_call else "response_format",
            )
        tools = [t for t in chat.tools if t["function"]["name"] in chat.must_call]
        answer = None if chat.must_call else chat.schema
        return call_grammar(syntax, tools or chat.tools, one=chat.one_call, answer=answer)

    # -- the template ----------------------------------------------------------------------------

    def _render_all(self, chat: Chat) -> str:
        """The first arrangement of system messages that the template shows whole."""
        messages = _addressed(chat.messages)
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
        extra: dict[str, Any] = dict(chat.variables)
        if chat.thinking is not None:
            extra["enable_thinking"] = chat.thinking
        if chat.effort is not None:
            extra["reasoning_effort"] = chat.effort
        if chat.tools:
            extra["tools"] = list(chat.tools)
        if self.harmony:
            messages = [_with_thinking(message) for message in messages]
        render = self.wrapper.apply_chat_template
        if chat.continue_last:
            last = messages[-1]["content"].lstrip()
            text = render(messages, tokenize=False, add_generation_prompt=False, **extra)
            said = last.rstrip()  # templates differ about white space
            return text[: text.rindex(said) + len(said)] + last[len(said) :]
        return render(messages, tokenize=False, add_generation_prompt=True, **extra)

    def _ends_in_reasoning(self, text: str) -> bool:
        if self.think is None:
            return False
        return text.rstrip().endswith(self.think[0])


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """An earlier call as gpt-oss's template takes it: all that led to it in one field."""
    if not message.get("tool_calls"):
        return message
    texts = (message.get("reasoning_content"), message["content"])
    message = {name: v for name, v in message.items() if name != "reasoning_content"}
    return {**message, "content": "", "thinking": "\n\n".join(t for t in texts if t)}


def _addressed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without Claude Code's billing line, which begins its system prompt.

    It means nothing to a model and is another one in every request, so that no prompt of twenty
    thousand tokens would begin like the one before.
    """
    left: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and _BILLING.match(message["content"]):
            message = {**message, "content": _BILLING.sub("", message["content"])}
            if not message["content"]:
                continue
        left.append(message)
    return left


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
