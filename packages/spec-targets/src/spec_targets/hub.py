"""From a model's name to its folder: a local folder, or a snapshot of the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from spec_core import LoadError

_PATTERNS = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(model: str | Path) -> Path:
    """The checkpoint folder of a model; fetches it from the hub where it is not on this disk.

    Args:
        model: A folder, or a hub id such as "mlx-community/Qwen3-4B-8bit". A checkpoint's Python
            files are not fetched.

    Raises:
        LoadError: neither exists, or the name is a file.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise LoadError(
            f'[model] "{model}" is a file; a checkpoint is a folder. '
            f"For a GGUF file write gguf:{model}."
        )
    name = str(model)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LoadError(f'[model] No folder "{name}". Give a checkpoint folder or <owner>/<name>.')
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except HFValidationError as error:
        raise LoadError(f'[model] "{name}" is not a Hugging Face id: {error}') from error
    except Exception as error:  # the hub client raises its transport's own errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise LoadError(
            f'[model] "{name}" is no folder here and could not be fetched from the hub: '
            f"{reason.rstrip('.')}. Check the name and the network, or give a folder."
        ) from error
