"""What a checkpoint folder says about itself that makes it unusable here, before weights are read.

Every refusal names the cause and what would work instead. Nothing of the checkpoint is executed.
"""

import json
from functools import cache
from glob import escape
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import LoadError
from spec_core.weightfile import check_weight_file

KNOWN_SINCE = "0.32.2"  # the oldest mlx-lm with every model type in FAMILIES
ELSEWHERE = {  # model types that mlx-lm lacks -> who has them
    "deepseek_v4": "mlx-vlm 0.7.10",
    "qwen4_exp": "mlx-vlm 0.7.10",
}
_HEAD_INSIDE = "its head is part of the backbone, so hidden states cannot be told from logits"
_UNTESTED = "its rollback has not been tested"
UNTESTED = {  # model types that mlx-lm has and no family here covers -> what stands in the way
    "afm7": "its last layers read the keys of an earlier one",
    "baichuan_m1": "one cache entry holds both a window and a recurrence",
    "bailing_hybrid": _UNTESTED,
    "bitnet": "its matmul is written for Metal alone",
    "deepseek_v32": "its attention picks the keys it reads by an index of its own",
    "glm_moe_dsa": "its attention picks the keys it reads by an index of its own",
    "gpt_neox": _HEAD_INSIDE,
    "iquestloopcoder": "it never calls a layer as a whole",
    "kimi_k3": "the output of a layer is a part of the residual stream",
    "lille-130m": _HEAD_INSIDE,
    "longcat_flash_ngram": "a cache entry holds token ids",
    "minimax_m3_vl": "its attention picks the keys it reads by an index of its own",
    "mistral4": _UNTESTED,
    "muse_spark": "a layer returns the input of the next layer's attention as well",
    "olmo": _HEAD_INSIDE,
    "phi3small": "its attention is block-sparse",
    "phixtral": "its final norm is part of the head",
    "prism_hadamard_qwen35": _UNTESTED,
}


def refuse_untested_model(model_type: str, module: str) -> None:
    """Refuse a family that mlx-lm runs and this package does not, with the reason.

    Args:
        model_type: As the checkpoint names it.
        module: The mlx-lm module that holds the class.

    Raises:
        LoadError: it is one of `UNTESTED`.
    """
    if module in UNTESTED:
        raise LoadError(
            f'[load] Model type "{model_type}" is in mlx-lm {version("mlx-lm")} and cannot be a '
            f"target: {UNTESTED[module]}. Run it with mlx-lm."
        )


def refuse_absent_model(model_type: str, module: str) -> None:
    """Refuse a family whose model class the installed mlx-lm does not have.

    Args:
        model_type: As the checkpoint names it.
        module: The mlx-lm module that holds the class.

    Raises:
        LoadError: it is not installed.
    """
    if find_spec(f"mlx_lm.models.{module}") is None:
        raise LoadError(
            f'[load] Model type "{model_type}" needs mlx-lm {KNOWN_SINCE} or newer, got mlx-lm '
            f"{version('mlx-lm')}. Install that version."
        )


def refuse_quantisation(config: dict[str, Any]) -> None:
    """Refuse packed weights that this MLX cannot multiply on this device; each kind is tried.

    Args:
        config: The checkpoint's config.json.

    Raises:
        LoadError: widths (1-bit packs on most devices), groups or modes without a kernel, bitnet
            without Metal.
    """
    settings = config.get("quantization") or config.get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise LoadError('[load] "quantization" must be a table of settings in config.json.')
    if settings.get("quant_method") == "bitnet" and not mx.metal.is_available():
        raise LoadError(
            '[load] A "bitnet" checkpoint needs a Metal device, which is not here. Use another '
            "quantisation of the model."
        )
    if "group_size" not in settings:
        return
    for entry in (settings, *settings.values()):
        if isinstance(entry, dict) and isinstance(entry.get("bits"), int):
            _refuse_packing(entry["bits"], entry.get("group_size", 64), entry.get("mode", "affine"))


@cache
def _refuse_packing(bits: int, group_size: int, mode: str) -> None:
    """Multiply a tiny packed matrix; on a device without the kernel MLX says so here."""
    try:
        packed = mx.quantize(mx.zeros((32, 512)), group_size, bits, mode)
        x = mx.zeros((2, 512))
        mx.eval(mx.quantized_matmul(x, *packed, group_size=group_size, bits=bits, mode=mode))
    except (ValueError, RuntimeError, TypeError) as error:
        raise LoadError(
            f'[load] {bits}-bit "{mode}" weights in groups of {group_size} need kernels that MLX '
            f"{version('mlx')} lacks on this device: {error} Use another quantisation of the model."
        ) from error


def refuse_remote_code(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    """Refuse Python that comes with the checkpoint, unless it is trusted.

    Raises:
        LoadError: config or tokenizer name code of their own; a file is not JSON.
    """
    if trusted:
        return
    configs = {"config.json": config}
    extra = folder / "tokenizer_config.json"
    if extra.is_file():
        try:
            configs[extra.name] = json.loads(extra.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise LoadError(f'[load] "{extra}" must be JSON, got: {error}') from error
    for name, content in configs.items():
        key = _code_key(content)
        if key is not None:
            raise LoadError(
                f'[load] "{name}" of this checkpoint names Python code of its own ("{key}"), '
                "which is not run. Pass --trust-remote-code if you trust it."
            )


def _code_key(content: Any) -> str | None:
    """The key that names code, at any depth, as a path; None without."""
    if not isinstance(content, dict):
        return None
    for key, value in content.items():
        if key in ("model_file", "auto_map"):
            return key
        deeper = _code_key(value)
        if deeper is not None:
            return f"{key}.{deeper}"
    return None


def refuse_patterns(folder: Path) -> None:
    """Refuse a folder whose name mlx-lm would take for a pattern, and so find no weights.

    Raises:
        LoadError: the path holds such a character.
    """
    if escape(str(folder)) != str(folder):
        raise LoadError(
            f'[load] The path "{folder}" must be free of "[", "*" and "?", which mlx-lm reads as '
            "a pattern. Rename the folder, or link to it under another name."
        )


def refuse_missing_weights(folder: Path) -> None:
    """Refuse a folder that lacks weight files, or holds something else under their names.

    Raises:
        LoadError: no weights, a listed file is missing, the list cannot be read, or a file is not
            whole.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (
            ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError,
        ) as error:  # fmt: skip
            raise LoadError(f'[load] "{index}" must hold a "weight_map".') from error
        missing = sorted(name for name in names if not (folder / str(name)).is_file())
        if missing:
            raise LoadError(
                f'[load] "{folder}" lacks {len(missing)} of {len(names)} weight files, the first '
                f'is "{missing[0]}". Download it again.'
            )
    elif not list(folder.glob("model*.safetensors")):
        raise LoadError(f'[load] "{folder}" must hold model*.safetensors, and does not.')
    for path in sorted(folder.glob("model*.safetensors")):  # what mlx-lm reads
        check_weight_file(path)
