"""Prompt sets: the ones that ship with `spec`, and JSONL files of the user's own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_core import SpecError, Target

BUNDLED = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        id: Name of the prompt.
        task: The set it belongs to, such as "code".
        where: File and line, for messages.
        messages: A conversation for the chat template.
        ids: The prompt's ids where the file gives them; the template is not used then.
    """

    id: str
    task: str
    where: str
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Any, target: Target, *, raw: bool = False) -> list[int]:
        """Ids of the prompt; `raw` joins the contents without a chat template.

        Raises:
            SpecError: the template refuses the messages, an id is not in the target's vocabulary,
                or the context has no room for an answer; names the line.
        """
        ids, room = self._encode(tokenizer, target.vocab_size, raw), target.context_length
        if room is not None and len(ids) >= room:
            raise SpecError(
                f"[prompts] {self.where} must be shorter than the model's context of {room} "
                f"tokens, got {len(ids)}. Shorten it."
            )
        return ids

    def _encode(self, tokenizer: Any, vocab_size: int, raw: bool) -> list[int]:
        if self.ids:
            strange = [i for i in self.ids if not 0 <= i < vocab_size]
            if strange:
                raise SpecError(
                    f"[prompts] {self.where} must have ids in 0..{vocab_size - 1}, got "
                    f"{strange[0]}. Encode the prompt with the model's own tokenizer."
                )
            return list(self.ids)
        if raw:
            return tokenizer.encode("\n".join(str(m["content"]) for m in self.messages))
        try:
            return tokenizer.encode_chat(self.messages)
        except SpecError as error:
            raise SpecError(
                f"[prompts] {self.where} must be messages that the model's chat template takes. "
                f"Mend the line, or use --raw.\n{error}"
            ) from error


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: `{"id", "task", "prompt" | "messages" | "prompt_ids"}` per line.

    Raises:
        SpecError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecError(
            f'[prompts] "{path}" must be UTF-8 text, got byte 0x{error.object[error.start]:02x} at '
            f"position {error.start}. Save it as UTF-8."
        ) from error
    except OSError as error:
        raise SpecError(
            f'[prompts] "{path}" must be a readable text file: {error.strerror or error}.'
        ) from error
    prompts = [
        _parse(line, f'"{path}" line {n}') for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise SpecError(f'[prompts] "{path}" must hold at least one prompt, got none.')
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
        raise SpecError(f"[prompts] {where} must be a JSON object: {reason}. Mend it.") from error
    except (ValueError, RecursionError) as error:  # a number too long, or too deep
        raise SpecError(f"[prompts] {where} must be a JSON object: {error}. Mend it.") from error
    if not isinstance(row, dict):
        raise SpecError(f"[prompts] {where} must be a JSON object, got {line.strip():.40}.")
    name, task = str(row.get("id", where)), str(row.get("task", "all"))
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return Prompt(name, task, where, ({"role": "user", "content": row["prompt"]},))
    ids = row.get("prompt_ids")
    if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
        return Prompt(name, task, where, ids=tuple(ids))
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Prompt(name, task, where, tuple(messages))
    raise SpecError(
        f'[prompts] {where} must have "prompt" (text), "messages" (role and content) '
        'or "prompt_ids" (numbers).'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= set(value)
