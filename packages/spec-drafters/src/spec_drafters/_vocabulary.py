"""Whether two checkpoints mean the same by the same token id, from their tokenizer.json files."""

import json
from pathlib import Path
from typing import Any

from spec_core import LoadError, Target
from spec_drafters._files import locate


def target_vocabulary(target: Target, model: Path | str | None) -> Path | None:
    """The tokenizer.json of a target: of the folder it was loaded from, else of its name.

    Args:
        target: One that says in `folder` where its checkpoint lies, or any other.
        model: Folder or hub id of the target.

    Returns:
        None where neither is known.

    Raises:
        LoadError: as `vocabulary_file`.
    """
    source = getattr(target, "folder", None) or model
    return None if source is None else vocabulary_file(source)


def vocabulary_file(model: Path | str) -> Path:
    """The tokenizer.json of a model.

    Raises:
        LoadError: the model has none, or is not on this disk and cannot be fetched.
    """
    path = locate(model) / "tokenizer.json"
    if not path.is_file():
        raise LoadError(
            f'[draft-model] Both models must have a "tokenizer.json", got none in "{path.parent}". '
            "Without it the vocabularies cannot be compared; use lookup."
        )
    return path


def check_same_vocabulary(draft: Path, target: Path) -> None:
    """Refuse two tokenizers that disagree on an id. One may lack some, such as tokens added later.

    Args:
        draft: The drafter's tokenizer.json.
        target: The target's.

    Raises:
        LoadError: they do; the message names the first entry that differs.
    """
    mine, theirs = read_vocabulary(draft), read_vocabulary(target)
    for token_id in sorted(set(mine) & set(theirs)):
        a, b = mine[token_id], theirs[token_id]
        if a != b:
            raise LoadError(
                f'[load] Drafter and target must share a vocabulary, got "{a}" and "{b}" for id '
                f"{token_id}. Use a drafter of the same family, or lookup."
            )


def read_vocabulary(path: Path) -> dict[int, str]:
    """Id -> token of a tokenizer.json, added tokens included.

    Raises:
        LoadError: the file is not a tokenizer's.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = {int(token_id): str(token) for token, token_id in vocab.items()}
        else:  # Unigram: a list of (token, score)
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}
        added = content.get("added_tokens") or []
        tokens.update({int(entry["id"]): str(entry["content"]) for entry in added})
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, RecursionError,
    ) as error:  # fmt: skip
        raise LoadError(
            f'[draft-model] "{path}" must be a tokenizer.json with a vocabulary, got: {error}. '
            "Download it again."
        ) from error
    return tokens
