"""Opens a checkpoint: config.json and the tensors of one or many safetensors files.

Knows the container, not what is in it. A file that is not what its name says is refused with what
it looks like.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from spec_core import LoadError
from spec_core.weightfile import looks_like
from spec_drafters._shards import Shards, read_headers

INDEX = "model.safetensors.index.json"
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
        return _snapshot(text)
    except HFValidationError as error:
        raise LoadError(f'[load] "{text}" must be a Hugging Face id, got: {error}.') from error
    except Exception as error:  # the hub client raises its transport's own errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise LoadError(
            f'[load] "{text}" must be a folder here or reachable on the hub, got '
            f"{reason.rstrip('.')}. Download it first and pass its folder."
        ) from error


def _snapshot(name: str) -> Path:
    """Fetch a drafter; of a full model with draft stages inside, only the files that hold them."""
    folder = Path(snapshot_download(name, allow_patterns=_PATTERNS[:1]))
    listed = _weight_map(folder / INDEX) if (folder / INDEX).is_file() else {}
    if not carries_drafts(listed):
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    files = sorted({file for tensor, file in listed.items() if is_bundled(tensor)})
    return Path(snapshot_download(name, allow_patterns=_PATTERNS[:1] + files))


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


def read_tensors(folder: Path) -> Shards:
    """The drafter's tensors by stored name; data is read when it is asked for.

    Of a full model that carries draft stages only the files that hold those are opened.

    Raises:
        LoadError: no safetensors file, a shard is missing, a file is not safetensors.
    """
    index = folder / INDEX
    listed: dict[str, str] = _weight_map(index) if index.is_file() else {}
    wanted = {name: file for name, file in listed.items() if is_bundled(name)}
    bundled = carries_drafts(listed)
    stored = {one.name: one for one in read_headers(_shards(folder, wanted if bundled else listed))}
    if bundled or carries_drafts(stored):
        stored = {name: one for name, one in stored.items() if is_bundled(name)}
    absent = sorted(set(wanted) - set(stored)) if bundled else []
    if absent:
        raise LoadError(
            f'[load] "{INDEX}" places "{absent[0]}" in "{listed[absent[0]]}", which lacks it '
            f"({len(absent)} tensors in all). Download both again."
        )
    return Shards(stored)


def carries_drafts(names: Iterable[str]) -> bool:
    """True when these are the tensors of a full model with DSpark stages inside."""
    return any(is_bundled(name) and ".markov_head." in name for name in names)


def is_bundled(name: str) -> bool:
    """True for a tensor of a draft stage inside a full model."""
    return name.removeprefix("model.").startswith("mtp.")


def own_drafts(model: str) -> Path | None:
    """The folder of a model that carries its own draft stages, if it is on this disk.

    Args:
        model: A folder, or a hub id whose files were fetched before.
    """
    index = Path(model).expanduser() / INDEX
    if not index.is_file():
        if model.count("/") != 1 or model.startswith((".", "/", "~")):
            return None
        try:
            cached = try_to_load_from_cache(model, INDEX)
        except HFValidationError:  # a name of another kind, such as gguf:<repo>/<file>
            return None
        if not isinstance(cached, str):
            return None
        index = Path(cached)
    return index.parent if carries_drafts(_weight_map(index)) else None


def _weight_map(index: Path) -> dict[str, str]:
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise LoadError(
            f'[load] "{index.name}" must hold a "weight_map" from tensors to files, got none. '
            "Download it again."
        )
    return listed


def _shards(folder: Path, listed: Mapping[str, str]) -> list[Path]:
    """The files that hold these tensors; all of the folder's without a list."""
    if listed:
        names = sorted(set(listed.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise LoadError(
                f'[load] "{INDEX}" names {len(names)} shards, got '
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
        raise LoadError(
            f'[load] "{path.name}" must be a JSON object, got {json.dumps(value):.40}. '
            "Download it again."
        )
    return value
