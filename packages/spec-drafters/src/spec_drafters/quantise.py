"""Writes a drafter checkpoint again in fewer bits, in MLX's affine packing.

Linears and tables are quantised; norms, convolution bases, the log-SNR embedding and the confidence
head stay as they are. The result loads like any drafter: its config says how it is packed. Knows
nothing about families beyond the names of those parts.
"""

import json
from pathlib import Path

import mlx.core as mx

from spec_core import LoadError
from spec_drafters._checkpoint import IGNORED, open_checkpoint
from spec_drafters._files import carries_drafts

_KEPT = ("confidence_head.", "log_snr_embed.", "fc_norm.")
_TABLES = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def quantise_checkpoint(
    source: Path | str, folder: Path | str, *, bits: int = 8, group_size: int = 64
) -> dict[str, int]:
    """Quantise the drafter in `source` into `folder`.

    Args:
        source: Folder of a drafter checkpoint that is not quantised yet.
        folder: Where to write config.json and model.safetensors; made if missing.
        bits: 4 or 8.
        group_size: Columns that share a scale; matrices it does not divide stay as they are.

    Returns:
        Counts: "quantised" and "kept" tensors, "bytes" written.

    Raises:
        LoadError: the source is not a checkpoint, or is quantised already.
        ValueError: bits is neither 4 nor 8.
    """
    if bits not in (4, 8):
        raise ValueError(f"[quantise] bits must be 4 or 8, got {bits}.")
    checkpoint = open_checkpoint(source)
    if carries_drafts(checkpoint.tensors):
        raise LoadError(
            f'[quantise] The source must be a drafter alone, got "{checkpoint.path.name}", a model '
            "with draft stages inside. Load it as it is: its matrices are packed then."
        )
    if any(name.endswith((".scales", ".weight_scale")) for name in checkpoint.tensors):
        raise LoadError(
            f'[quantise] The source must not be quantised, got scales in "{checkpoint.path.name}". '
            "Start from the full-precision checkpoint."
        )
    written: dict[str, mx.array] = {}
    n_quantised = 0
    for name, array in checkpoint.tensors.items():
        if name.startswith(IGNORED):
            continue
        if not _is_matrix(name, array, group_size):
            written[name] = array
            continue
        base = name.removesuffix(".weight")
        packed = mx.quantize(array, group_size=group_size, bits=bits)
        written[name], written[f"{base}.scales"], written[f"{base}.biases"] = packed
        n_quantised += 1
    config = dict(checkpoint.config)
    config["quantization"] = {"group_size": group_size, "bits": bits}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    path = target / "model.safetensors"
    mx.save_safetensors(str(path), written, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    kept = len(written) - 3 * n_quantised
    return {"quantised": n_quantised, "kept": kept, "bytes": path.stat().st_size}


def _is_matrix(name: str, array: mx.array, group_size: int) -> bool:
    if array.ndim != 2 or array.shape[1] % group_size or name.startswith(_KEPT):
        return False
    return name.endswith(".weight") or name in _TABLES
