"""The conversion from one GGUF file to one folder.

Reads the header, plans, and streams tensors into a staged folder that appears only when it is
complete. Knows nothing about the command line.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from spec_convert.config import generation_config
from spec_convert.errors import ConvertError, quote, quote_path
from spec_convert.facts import Facts
from spec_convert.families import architecture_of
from spec_convert.floats import BY_NAME, FloatType
from spec_convert.names import Architecture
from spec_convert.plan import (
    Options,
    PackedStorage,
    Plan,
    Planned,
    inexact,
    make_plan,
    quantization_section,
)
from spec_convert.repack import ScaleOverflowError
from spec_convert.report import Progress, Report, TensorReport
from spec_convert.source import Source
from spec_convert.tokenizer import tokenizer_files
from spec_convert.transfer import ErrorMeter, pieces
from spec_convert.writer import SafetensorsWriter, check_target, staged_folder

SHARD_BYTES = 5_000_000_000
_SPARE_BYTES = 64 << 20
_ARENA_BYTES = 16 << 20


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    scales: str = "exact",
    exact_only: bool = False,
    force: bool = False,
    raw_names: bool = False,
    tokenizer: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Convert a GGUF file to a folder of safetensors that MLX can load.

    Args:
        source: the GGUF file, any part of a split one, or `gguf:<repo or folder>/<file>`.
        out: folder to create.
        dtype: "f32", "f16" or "bf16" stores every tensor in that type; None carries quantised
            blocks over to MLX affine groups and keeps other tensors as they are.
        scales: "exact" keeps scales in float32 where float16 would change a value; "f16" keeps
            all in float16, which saves up to a bit per weight and rounds those.
        exact_only: refuse a file with a tensor that cannot be kept exactly.
        force: replace an earlier output in `out`.
        raw_names: keep GGUF tensor names and write no configuration or tokeniser.
        tokenizer: write the tokeniser; False leaves it to the caller.
        shard_bytes: start a new file before one grows beyond this.
        progress: called with bytes done, bytes in all, and the tensor's name.

    Returns:
        What was done, tensor by tensor.

    Raises:
        ConvertError: the source cannot be used, or the output may not be written.
    """
    begin = time.perf_counter()
    # glibc gives memory back when more is free than twice the largest block it ever released;
    # without this the temporaries of every chunk are fetched from the kernel anew.
    np.empty(_ARENA_BYTES, np.uint8)
    if scales not in ("exact", "f16"):
        raise ConvertError(f'[convert] scales must be "exact" or "f16", got {quote(scales)}.')
    options = Options(_float_type(dtype), exact_only, small_scales=scales == "f16")
    target = Path(out)
    check_target(target, force)
    with Source(source) as opened:
        container = opened.container
        architecture = None if raw_names else architecture_of(container.metadata)
        facts = None if architecture is None else Facts(container, opened.vector)
        documents = _documents(architecture, facts, tokenizer)

        def write(wide: bool) -> tuple[list[TensorReport], tuple[str, ...]]:
            plan = make_plan(container, architecture, facts, options, wide)
            _check_space(target, plan)
            with staged_folder(target, force) as folder:
                _write_documents(folder, documents, plan)
                shards = _shards(plan.tensors, shard_bytes)
                return _write_weights(opened, folder, shards, exact_only, progress), plan.dropped

        try:
            reports, dropped = write(wide=False)
        except ScaleOverflowError:
            # Weights beyond 500 do not occur in real models, so start again once, wider.
            reports, dropped = write(wide=True)
    name = container.metadata.text("general.architecture", "")
    return Report(target, name, tuple(reports), dropped, time.perf_counter() - begin)


def _float_type(dtype: str | None) -> FloatType | None:
    if dtype is None:
        return None
    if dtype not in BY_NAME:
        known = ", ".join(f'"{name}"' for name in BY_NAME)
        raise ConvertError(f"[convert] dtype must be one of {known}, got {quote(dtype)}.")
    return BY_NAME[dtype]


def _documents(
    architecture: Architecture | None, facts: Facts | None, tokenizer: bool
) -> dict[str, dict[str, Any]]:
    if architecture is None or facts is None:
        return {}
    documents = {"config.json": architecture.config(facts)}
    if architecture.drafter:
        return documents
    documents["generation_config.json"] = generation_config(facts.metadata)
    return documents | (tokenizer_files(facts.metadata) if tokenizer else {})


def _write_documents(folder: Path, documents: dict[str, dict[str, Any]], plan: Plan) -> None:
    for name, document in documents.items():
        quantization = quantization_section(plan.tensors) if name == "config.json" else None
        whole = document | ({"quantization": quantization} if quantization else {})
        indent = None if name == "tokenizer.json" else 2
        text = json.dumps(whole, indent=indent, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def _write_weights(
    source: Source,
    folder: Path,
    shards: list[list[Planned]],
    exact_only: bool,
    progress: Progress | None,
) -> list[TensorReport]:
    total = sum(tensor.n_bytes_read for tensors in shards for tensor in tensors)
    done = 0
    reports: list[TensorReport] = []
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        entries = [entry for tensor in tensors for entry in tensor.entries]
        index.update((entry.name, name) for entry in entries)
        with SafetensorsWriter(folder / name, entries, {"format": "mlx"}) as writer:
            for tensor in tensors:
                report = _write_tensor(source, writer, tensor, done, total, progress)
                done += tensor.n_bytes_read
                if exact_only and report.max_error:
                    raise inexact(tensor)
                reports.append(report)
        _check_file(folder / name, len(entries))
    if len(shards) > 1:
        _write_index(folder, sum(tensor.n_bytes for part in shards for tensor in part), index)
    return reports


def _write_tensor(
    source: Source,
    writer: SafetensorsWriter,
    tensor: Planned,
    done: int,
    total: int,
    progress: Progress | None,
) -> TensorReport:
    meter = ErrorMeter()
    entries = tensor.entries
    for piece in pieces(source, tensor, meter):
        for entry, array in zip(entries, piece.arrays, strict=True):
            writer.append(entry.name, array)
        done += piece.n_bytes_read
        if progress is not None:
            progress(done, total, tensor.info.name)
    storage = tensor.storage
    return TensorReport(
        source=tensor.info.name,
        target=tensor.slot.name,
        source_type=tensor.info.kind.name,
        layout=str(storage) if isinstance(storage, PackedStorage) else storage.tag,
        shape=tensor.slot.shape_of(tensor.info.shape),
        bytes_before=tensor.n_bytes_read,
        bytes_after=tensor.n_bytes,
        max_error=meter.largest,
        rms_error=meter.rms,
    )


def _shards(tensors: tuple[Planned, ...], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.n_bytes
    return shards


def _write_index(folder: Path, total: int, index: dict[str, str]) -> None:
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8", newline="\n")


def _check_file(path: Path, n_tensors: int) -> None:
    """The reference reader must accept what was written."""
    with safe_open(path, framework="np") as file:
        assert len(file.keys()) == n_tensors, path.name


def _check_space(target: Path, plan: Plan) -> None:
    needed = sum(tensor.n_bytes for tensor in plan.tensors) + _SPARE_BYTES
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConvertError(
            f"[writer] {quote_path(parent)} must have {needed} bytes free, got {free}. "
            "Free some space or choose another disk."
        )
