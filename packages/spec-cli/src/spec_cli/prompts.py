"""Prompt sets: the ones that ship with `spec`, and JSONL files of the user's own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_core import SpecError

BUNDLED = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        id: Name of the prompt.
        task: The set it belongs to, such as "code".
        messages: A conversation for the chat template.
        ids: The prompt's ids where the file gives them; the template is not used then.
    """

    id: str
    task: str
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Any, *, raw: bool = False) -> list[int]:
        """Ids of the prompt; `raw` joins the contents without a chat template."""
        if self.ids:
            return list(self.ids)
        if raw:
            return tokenizer.encode("\n".join(str(m["content"]) for m in self.messages))
        return tokenizer.encode_chat(self.messages)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: `{"id", "task", "prompt" | "messages" | "prompt_ids"}` per line.

    Raises:
        SpecError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f'[prompts] "{path}" must be a readable text file: {error}') from error
    prompts = [
        _parse(line, f'"{path}" line {n}') for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise SpecError(f'[prompts] "{path}" must hold at least one prompt, got none.')
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"[prompts] {where} must be a JSON object: {error}") from error
    if not isinstance(row, dict):
        raise SpecError(f"[prompts] {where} must be a JSON object, got {type(row).__name__}.")
    name, task = str(row.get("id", where)), str(row.get("task", "all"))
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return Prompt(name, task, ({"role": "user", "content": row["prompt"]},))
    ids = row.get("prompt_ids")
    if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
        return Prompt(name, task, ids=tuple(ids))
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Prompt(name, task, tuple(messages))
    raise SpecError(
        f'[prompts] {where} must have "prompt" (text), "messages" (role and content) '
        'or "prompt_ids" (numbers).'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= set(value)
