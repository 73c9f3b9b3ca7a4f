"""An opened drafter checkpoint: its config, its tensors under canonical names, and its kind."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import LoadError, Target
from spec_drafters._files import read_config, read_tensors
from spec_drafters._gguf import read_gguf
from spec_drafters._head import HeadConfig, Lineage
from spec_drafters._packaging import read_block_head
from spec_drafters._shards import Shards
from spec_drafters._weights import Weights

# Needed in training only.
IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.", "mask_embedding")
_PACKED_ELSEWHERE = (".weight_packed", ".qweight")
_PREFIXES = ("model.", "logit_head.")
_RENAMED = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a drafter folder holds.

    Attributes:
        path: The folder.
        config: config.json.
        tensors: By canonical name; data is read when it is first used.
        lineage: What a GGUF file says beyond the config's keys; None for safetensors.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, mx.array]
    lineage: Lineage | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, as stored."""
        if isinstance(self.tensors, Shards):
            return {name: at.shape for name, at in self.tensors.stored.items()}
        return {name: tuple(array.shape) for name, array in self.tensors.items()}

    def weights(self, where: str, bits: int, dtype: mx.Dtype) -> Weights:
        """The tensors, ready to be taken one by one."""
        quantization = self.config.get("quantization") or {}
        return Weights(
            where,
            self.tensors,
            bits=bits,
            dtype=dtype,
            packed_group_size=int(quantization.get("group_size", 64)),
            ignored=IGNORED,
        )


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a drafter folder or GGUF file; reads the config and the tensors' headers.

    Raises:
        LoadError: the folder does not hold a checkpoint.
    """
    folder = Path(path)
    if folder.suffix == ".gguf" and folder.is_file():
        config, tensors, lineage = read_gguf(folder)
        config["quantization"] = {"group_size": 32}  # of the blocks that MLX repacks
        return Checkpoint(folder, config, tensors, lineage)
    if not folder.is_dir():
        raise LoadError(
            f'[load] A drafter must be a folder or a GGUF file, got "{folder}". Pass the folder '
            "that holds config.json and the weights."
        )
    found = read_tensors(folder)
    _refuse_packed(found.stored)
    tensors = Shards({_canonical(name): at for name, at in found.stored.items()})
    return Checkpoint(folder, read_config(folder), tensors)


def _refuse_packed(names: Iterable[str]) -> None:
    """Refuse integer packings of other engines, such as compressed-tensors' W4A16."""
    packed = next((name for name in names if name.endswith(_PACKED_ELSEWHERE)), None)
    if packed is not None:
        raise LoadError(
            '[load] A drafter\'s weights must be plain, FP8, NVFP4 with "weight_scale_2", or '
            f'packed by MLX, got "{packed}", as compressed-tensors, AWQ and GPTQ pack them. '
            "Use its bf16 checkpoint: it is quantised at load."
        )


def read_head(checkpoint: Checkpoint, target: Target) -> HeadConfig:
    """The block head that a checkpoint holds."""
    return read_block_head(
        checkpoint.config, checkpoint.shapes, target.hidden_size, checkpoint.lineage
    )


def _canonical(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _RENAMED.get(name, name)
