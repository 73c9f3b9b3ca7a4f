"""From a checkpoint folder to (target, tokenizer). Refuses what it cannot run, with the reason."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model, load_tokenizer

from spec_core import LoadError, registry
from spec_targets.base import MlxTarget
from spec_targets.families import FAMILIES, Family
from spec_targets.tokenizer import HfTokenizer


def load_target(
    path: str | Path, *, dtype: mx.Dtype | None = None, trust_remote_code: bool = False
) -> tuple[MlxTarget, HfTokenizer]:
    """Load an mlx-lm checkpoint folder.

    Args:
        path: Folder with config.json, safetensors and tokenizer files.
        dtype: Compute type; without it the checkpoint's own, except on the CPU backend, which
            computes in float32 (its 16-bit quantised matmul accumulates in 16 bits).
        trust_remote_code: Allow the checkpoint's own Python to run.

    Raises:
        LoadError: the folder is not a checkpoint this package can run.
    """
    folder = Path(path)
    config = read_config(folder)
    _refuse_remote_code(folder, config, trust_remote_code)
    model_type = config["model_type"]
    family = family_for(model_type)
    _refuse_missing_weights(folder)
    try:
        model, _ = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        if dtype is None and mx.default_device() == mx.cpu:
            dtype = mx.float32
        if dtype is not None:
            model.set_dtype(dtype)
        mx.eval(model.parameters())
        model.eval()
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise LoadError(
            f'[load] mlx-lm must be able to load "{folder}", and says: {_first_line(error)}'
        ) from error
    text_config = config.get("text_config", config)
    target = MlxTarget(
        model,
        family,
        model_type,
        context_length=text_config.get("max_position_embeddings"),
        n_heads=text_config.get("num_attention_heads", 1),
    )
    return target, _load_tokenizer(folder, config, trust_remote_code)


def family_for(model_type: str) -> Family:
    """The family of a `model_type`: ours, or another distribution's.

    Raises:
        LoadError: nobody provides it.
    """
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    if model_type in registry.names(registry.TARGETS):
        return registry.load(registry.TARGETS, model_type)
    known = ", ".join(sorted({*FAMILIES, *registry.names(registry.TARGETS)}))
    raise LoadError(f'[load] No target family "{model_type}". Known: {known}.')


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        LoadError: no folder, no config, not JSON, or no model_type.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f'[load] No folder "{folder}". Give a checkpoint folder.')
    if not path.is_file():
        raise LoadError(f'[load] "{folder}" must hold a config.json, and does not.')
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(f'[load] "{path}" must be JSON, got: {_first_line(error)}') from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise LoadError(f'[load] "{path}" must name a "model_type", and does not.')
    return config


def _refuse_remote_code(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    if trusted:
        return
    configs = {"config.json": config}
    extra = folder / "tokenizer_config.json"
    if extra.is_file():
        try:
            configs[extra.name] = json.loads(extra.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LoadError(f'[load] "{extra}" must be JSON, got: {error}') from error
    for name, content in configs.items():
        for key in ("model_file", "auto_map"):
            if key in content:
                raise LoadError(
                    f'[load] "{name}" of this checkpoint names Python code of its own ("{key}"), '
                    "which is not run. Pass --trust-remote-code if you trust it."
                )


def _refuse_missing_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f'[load] "{index}" must hold a "weight_map".') from error
        missing = sorted(name for name in names if not (folder / str(name)).is_file())
        if missing:
            raise LoadError(
                f'[load] "{folder}" lacks {len(missing)} of {len(names)} weight files, the first '
                f'is "{missing[0]}". Download it again.'
            )
    elif not list(folder.glob("model*.safetensors")):
        raise LoadError(f'[load] "{folder}" must hold model*.safetensors, and does not.')


def _load_tokenizer(folder: Path, config: dict[str, Any], trusted: bool) -> HfTokenizer:
    try:
        wrapper = load_tokenizer(
            folder,
            {"trust_remote_code": trusted},
            eos_token_ids=config.get("eos_token_id"),
        )
    except Exception as error:  # transformers raises whatever its tokenizer classes do
        raise LoadError(
            f'[load] The tokenizer files of "{folder}" must load, and do not: {_first_line(error)}'
        ) from error
    return HfTokenizer(wrapper)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
