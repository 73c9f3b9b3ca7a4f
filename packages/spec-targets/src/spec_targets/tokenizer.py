"""A Hugging Face tokenizer behind the contract of spec-core, with the model's chat template."""

from collections.abc import Sequence
from typing import Any

from spec_core import SpecError

FINAL = "<|channel|>final<|message|>"  # begins what a user reads, in gpt-oss's format


class HfTokenizer:
    """Wraps what `mlx_lm.utils.load_tokenizer` returns.

    Args:
        wrapper: The mlx-lm TokenizerWrapper.

    Attributes:
        wrapper: As given.
        harmony: The model answers in channels, as gpt-oss does: its chat template has the final
            one, and its vocabulary the marks of a message.
        stop_ids: What ends a text; in harmony the call of a tool too, whatever the configs list.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._tokenizer = wrapper._tokenizer
        template = getattr(self._tokenizer, "chat_template", None)
        in_channels = isinstance(template, str) and FINAL in template
        # A copy of the whole vocabulary, which few models need.
        vocabulary: dict[str, int] = self._tokenizer.get_vocab() if in_channels else {}
        self.harmony = {"<|start|>", "<|channel|>", "<|message|>"} <= vocabulary.keys()
        ends = ("<|return|>", "<|call|>") if self.harmony else ()
        self.stop_ids = frozenset(
            [*map(int, wrapper.eos_token_ids), *(vocabulary[e] for e in ends if e in vocabulary)]
        )

    @property
    def has_chat_template(self) -> bool:
        """False for base models, which take raw text only."""
        return bool(self.wrapper.has_chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text; the start token is added where the tokenizer wants one.

        Raises:
            SpecError: the text is no Unicode.
        """
        _refuse_surrogates(text)
        bos = self._tokenizer.bos_token
        add_special = bos is None or not text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special))

    def encode_chat(self, messages: Sequence[dict[str, Any]], **template_args: Any) -> list[int]:
        """Ids of a conversation through the chat template, ready for the assistant's answer.

        Args:
            messages: Dicts with "role" and "content".
            template_args: Variables of the template, such as enable_thinking.

        Raises:
            SpecError: the tokenizer has no chat template, the template refuses the messages, or
                their text is no Unicode.
        """
        if not self.has_chat_template:
            raise SpecError(
                "[tokenizer] The model has no chat template, so it takes raw text only. "
                "Pass --raw, or use an instruct model."
            )
        for message in messages:
            _refuse_surrogates(message.get("content"))
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **template_args,
            )
        except Exception as error:  # jinja's own errors: the template is data of the checkpoint
            said = " ".join(str(error).split())[:300]
            raise SpecError(
                f"[tokenizer] The chat template refused the messages: {said}"
            ) from error
        return with_start([int(i) for i in ids], self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def with_start(ids: list[int], tokenizer: Any) -> list[int]:
    """Ids of a conversation with the start token in front, where raw texts get one.

    Most templates write it; one that leaves it to the tokenizer gets it here, and none gets two.
    """
    start = tokenizer.bos_token_id
    if start is None or ids[:1] == [start]:
        return ids
    return [start, *ids] if list(tokenizer.encode(""))[:1] == [start] else ids


def _refuse_surrogates(text: Any) -> None:
    """Half a surrogate pair, as JSON can spell it, is no character of any text."""
    if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
        raise SpecError(
            "[tokenizer] A text must be Unicode, got half a surrogate pair. Send whole characters."
        )
