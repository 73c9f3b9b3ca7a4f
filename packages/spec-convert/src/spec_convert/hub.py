"""Where a source is on this machine: a path, or a file of the Hugging Face hub fetched once.

`gguf:<repo>/<file>` names a file of a repository, or of a local folder. Downloads land in the hub's
own cache, which resumes an interrupted one. Knows nothing about what is in the files.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from spec_convert.errors import ConvertError, quote

PREFIX = "gguf:"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def locate(source: str | Path) -> Path:
    """The local file of a source; all parts of a split file are fetched.

    Args:
        source: a path, or `gguf:<repo or folder>/<file>`.

    Returns:
        The file, or the first part of a split file.

    Raises:
        ConvertError: the name is incomplete, hub access is not installed, or the download failed.
    """
    text = str(source)
    if not text.startswith(PREFIX) or Path(source).exists():
        return Path(source)
    name = text.removeprefix(PREFIX)
    if name and Path(name).exists():
        return Path(name)
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file):
        raise ConvertError(
            f"[hub] A source must be gguf:OWNER/REPOSITORY/FILE.gguf or a path, got {quote(text)}."
        )
    files = part_names(file)
    return [_download(f"{owner}/{repository}", part) for part in files][0]


def part_names(file: str) -> list[str]:
    """Names of all parts of a split file, the first one first; the name itself otherwise."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    count = int(match[3])
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)]


def _download(repository: str, file: str) -> Path:
    # An extra, and slow to import: only for those who ask for the hub.
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConvertError(
            "[hub] Sources on the hub need huggingface-hub, which is not installed. "
            "Install spec-convert[hub], or download the file and name its path."
        ) from error
    try:
        return Path(hub.hf_hub_download(repo_id=repository, filename=file))
    except Exception as error:  # the hub raises errors of several HTTP libraries
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConvertError(
            f"[hub] {quote(file)} of {quote(repository)} could not be fetched: {reason}. "
            "Check the name and the connection."
        ) from error
