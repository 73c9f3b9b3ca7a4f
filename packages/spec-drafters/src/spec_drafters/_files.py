"""Opens a checkpoint: config.json and the tensors of one or many safetensors files.

Knows the container, not what is in it. A file that is not what its name says is refused with what
it looks like.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from spec_core import LoadError
from spec_core.weightfile import check_weight_file, looks_like

_INDEX = "model.safetensors.index.json"
_PATTERNS = ["*.json", "*.safetensors"]  # a checkpoint's Python files are not fetched


def locate(name: Path | str) -> Path:
    """The folder of a drafter (or its GGUF file): here, or a snapshot of the Hugging Face hub.

    Raises:
        LoadError: neither exists.
    """
    path = Path(str(name).removeprefix("gguf:")).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    text = str(name)
    if path.is_file() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise LoadError(
            f'[load] A drafter must be a folder or <owner>/<name> on the hub, got "{text}". '
            "Pass the folder that holds config.json and the weights."
        )
    try:
        return Path(snapshot_download(text, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise LoadError(f'[load] "{text}" must be a Hugging Face id, got: {error}.') from error
    except Exception as error:  # the hub client raises its transport's own errors
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise LoadError(
            f'[load] "{text}" must be a folder here or reachable on the hub, got '
            f"{type(error).__name__}: {reason}. Download it first and pass its folder."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        LoadError: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(
            f'[load] A drafter folder must hold "config.json", got none in "{folder}". '
            "Pass the folder of a drafter checkpoint."
        )
    return _read_json(path)


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of the checkpoint by name; data is read when it is first used.

    Raises:
        LoadError: no safetensors file, a shard is missing, a file is not safetensors.
    """
    tensors: dict[str, mx.array] = {}
    for path in _shards(folder):
        check_weight_file(path)
        try:
            loaded = mx.load(str(path))
        except (RuntimeError, ValueError) as error:  # a header that the file does not bear out
            reason = " ".join(str(error).split())[:200]
            raise LoadError(
                f'[load] "{path.name}" must be a whole safetensors file, got: {reason} '
                "Download it again."
            ) from error
        tensors.update(loaded)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return tensors


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise LoadError(
                f'[load] "{_INDEX}" names {len(names)} shards, got '
                f"{len(names) - len(missing)}; missing: {', '.join(missing)}. Download them."
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise LoadError(
            f'[load] A drafter folder must hold safetensors files, got none in "{folder}". '
            "Download the weights."
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f'[load] "{path.name}" must be JSON, got {looks_like(path.read_bytes()[:64])} '
            f"({error}). Download it again."
        ) from error
    if not isinstance(value, dict):
        raise LoadError(f'[load] "{path.name}" must be a JSON object, got {type(value).__name__}.')
    return value
