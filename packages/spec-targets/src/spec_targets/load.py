"""From a checkpoint folder to (target, tokenizer). Refuses what it cannot run, with the reason."""

import json
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, load_model, load_tokenizer

from spec_core import LoadError, SpecError, registry
from spec_core.errors import one_line
from spec_core.room import refuse_without_room
from spec_kernels.installation import Mode
from spec_targets.acceleration import install_kernels
from spec_targets.base import MlxTarget
from spec_targets.families import FAMILIES, Family
from spec_targets.hub import locate
from spec_targets.quantised import check_kv_bits
from spec_targets.refuse import (
    ELSEWHERE,
    refuse_absent_model,
    refuse_missing_weights,
    refuse_patterns,
    refuse_quantisation,
    refuse_remote_code,
    refuse_untested_model,
)
from spec_targets.tokenizer import HfTokenizer


def load_target(
    model: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    kv_bits: int | None = None,
    group: mx.distributed.Group | None = None,
    kernels: Mode = "auto",
    exact: bool = False,
    verdicts: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[MlxTarget, HfTokenizer]:
    """Load an mlx-lm checkpoint.

    Args:
        model: A folder with config.json, safetensors and tokenizer files, or a hub id.
        dtype: Compute type; without it the checkpoint's own, with two exceptions: the CPU backend
            computes in float32 (its 16-bit quantised matmul accumulates in 16 bits), and a GPU
            computes in bfloat16 what is packed but keeps some values in float32, as a converted
            GGUF does: one of them would draw every product into float32.
        kv_bits: Hold keys and values in 4 or 8 bits from the first token; see `quantised`.
        group: Split every layer over these processes, all of which make this call; see `parallel`.
        kernels: The few-row kernels: "auto" races them where they have been measured (NVIDIA),
            which takes a minute or two the first time, "on" on any GPU, "off" installs none.
        exact: Install them so that a row's bits do not depend on its neighbours, or refuse.
        verdicts: File that keeps which kernels win on this device.
        trust_remote_code: Allow the checkpoint's own Python to run.

    Raises:
        LoadError: the folder is not a checkpoint this package can run.
        ValueError: kv_bits is neither 4 nor 8.
    """
    if kv_bits is not None:
        check_kv_bits(kv_bits)
    folder = locate(model)
    config = read_config(folder)
    refuse_remote_code(folder, config, trust_remote_code)
    model_type = config["model_type"]
    family = family_for(model_type)
    text_config = _text_config(config)
    refuse_quantisation(config)
    refuse_patterns(folder)
    refuse_missing_weights(folder)
    try:
        network, _ = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        dtype = dtype or _compute_type(network, on_cpu=mx.default_device() == mx.cpu)
        if dtype is not None:
            network.set_dtype(dtype)
        if group is not None and group.size() > 1:
            _split(network, config, group)
        arrays: list[tuple[str, Any]] = tree_flatten(network.parameters())  # pyright: ignore[reportAssignmentType]
        n_bytes = sum(array.nbytes for _, array in arrays)
        refuse_without_room("load", f'The model in "{folder}"', n_bytes)
        mx.eval(network.parameters())
        network.eval()
        target = MlxTarget(
            network,
            family,
            model_type,
            context_length=text_config.get("max_position_embeddings"),
            n_heads=text_config.get("num_attention_heads", 1),
            kv_bits=kv_bits,
        )
    except SpecError:
        raise
    except Exception as error:  # a config with wrong values fails in any way, up to the first row
        raise LoadError(
            f'[load] mlx-lm must be able to load "{folder}", and says: {one_line(error, 300)}'
        ) from error
    target.folder = folder
    target.open_beside = partial(load_target, kernels=kernels, verdicts=verdicts)
    installed = install_kernels(target, text_config, mode=kernels, exact=exact, verdicts=verdicts)
    target.use_kernels(installed, replay=group is None or group.size() == 1)
    return target, _load_tokenizer(folder, config, trust_remote_code)


def family_for(model_type: str) -> Family:
    """The family of a `model_type`: ours, or another distribution's.

    Raises:
        LoadError: nobody provides it.
    """
    module = MODEL_REMAPPING.get(model_type, model_type)
    if module in FAMILIES:
        refuse_absent_model(model_type, module)
        return FAMILIES[module]
    if model_type in registry.names(registry.TARGETS):
        return registry.load(registry.TARGETS, model_type)
    refuse_untested_model(model_type, module)
    if model_type in ELSEWHERE:
        raise LoadError(
            f'[load] Model type "{model_type}" is not in mlx-lm {version("mlx-lm")}; '
            f"{ELSEWHERE[model_type]} has it. Run it there."
        )
    known = sorted({*FAMILIES, *registry.names(registry.TARGETS)})
    near = get_close_matches(model_type, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise LoadError(f'[load] No target family "{model_type}". Known: {", ".join(known)}.{hint}')


def _compute_type(network: nn.Module, *, on_cpu: bool) -> mx.Dtype | None:
    """What to compute in where the caller has no wish; None for the checkpoint's own type."""
    if on_cpu:
        return mx.float32
    arrays = [array for _, array in tree_flatten(network.parameters())]
    packed = any(array.dtype == mx.uint32 for array in arrays)
    return mx.bfloat16 if packed and any(a.dtype == mx.float32 for a in arrays) else None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the text model; checks what is read here."""
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise LoadError('[load] "text_config" must be a table of settings in config.json.')
    for key in ("max_position_embeddings", "num_attention_heads"):
        value = text_config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise LoadError(
                f'[load] "{key}" in config.json must be a whole number above 0, got {value!r}.'
            )
    return text_config


def _split(network: Any, config: dict[str, Any], group: mx.distributed.Group) -> None:
    """Keep this process's part of every layer; mlx-lm knows how for some of its models."""
    shard, n_ranks = getattr(network, "shard", None), group.size()
    model_type = config["model_type"]
    if shard is None:
        raise LoadError(
            f'[load] mlx-lm {version("mlx-lm")} cannot split model type "{model_type}" over '
            f"{n_ranks} processes. Run it in one."
        )
    text_config = config.get("text_config", config)
    for key in ("num_attention_heads", "num_key_value_heads"):
        n_heads = text_config.get(key) or n_ranks
        if n_heads % n_ranks:
            raise LoadError(
                f'[load] "{key}" must be a multiple of the {n_ranks} processes, got {n_heads}. '
                "Start another number of them."
            )
    try:
        shard(group)
    except (AssertionError, ValueError) as error:
        raise LoadError(
            f'[load] Model type "{model_type}" must divide by the {n_ranks} processes: '
            f"{one_line(error, 300)} Start another number of them."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        LoadError: no folder, no config, not JSON, or no model_type.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise LoadError(f'[load] No folder "{folder}". Give a checkpoint folder.')
    if not path.is_file():
        raise LoadError(
            f'[load] "{folder}" must hold a config.json, and does not. '
            "Give the folder of a checkpoint."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(
            f'[load] "{path}" must be JSON, got: {one_line(error, 300)}. Download it again.'
        ) from error
    found = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(found, str):
        absent = isinstance(config, dict) and found is None
        shown = "none" if absent else json.dumps(config if found is None else found)
        raise LoadError(
            f'[load] "{path}" must be an object that names a "model_type", got {shown:.60}. '
            "Give the folder of a checkpoint, or download the file again."
        )
    return config


def _end_ids(folder: Path, config: dict[str, Any]) -> list[int] | None:
    """Every id that any of the configs lets a text end with; None where none says."""
    sources = [config, config.get("text_config")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        try:
            sources.append(json.loads(generation.read_text(encoding="utf-8")))
        except (ValueError, OSError, RecursionError) as error:
            raise LoadError(
                f'[load] "{generation}" must be JSON, got: {one_line(error, 300)}'
            ) from error
    found: set[int] = set()
    for source in sources:
        stated = source.get("eos_token_id") if isinstance(source, dict) else None
        for token in stated if isinstance(stated, list) else [stated]:
            if token is not None and type(token) is not int:
                raise LoadError(
                    f'[load] "eos_token_id" in the configs of "{folder}" must be a whole number or '
                    f"a list of them, got {stated!r}."
                )
            found |= set() if token is None else {token}
    return sorted(found) or None


def _load_tokenizer(folder: Path, config: dict[str, Any], trusted: bool) -> HfTokenizer:
    ends = _end_ids(folder, config)
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": trusted}, eos_token_ids=ends)
    except Exception as error:  # transformers raises whatever its tokenizer classes do
        raise LoadError(
            f'[load] The tokenizer files of "{folder}" must load, and do not: '
            f"{one_line(error, 300)}"
        ) from error
    return HfTokenizer(wrapper)
