"""What a calibration depends on, as a key: machine, versions, kernels, model, drafter, settings.

Two set-ups with one key must cost the same; when in doubt, something more goes into the key. Knows
nothing about curves.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

_PACKAGES = (
    "mlx-lm",
    "spec-core",
    "spec-targets",
    "spec-kernels",
    "spec-drafters",
    "spec-calibrate",
)
_HEAD = 1 << 20  # bytes read from the start of each weight file
_TAIL = 1 << 12


@dataclass(frozen=True, slots=True)
class Key:
    """Everything that a calibration is valid for.

    Attributes:
        device: Name of the device that computes, with memory or cores.
        system: Operating system and its release.
        mlx: Version of MLX.
        packages: Versions of the packages that shape the forward.
        kernels: State of the kernels (and the BLAS), in words.
        model: Identity of the target's weights; see `model_identity`.
        quantisation: Of the target's weights, such as "4 bits, group 64"; empty for none.
        kv_bits: Bits of the target's cache.
        drafter: Identity of the drafter and its settings; empty without one.
        batch: Sequences decoded together.
    """

    device: str
    system: str
    mlx: str
    packages: Mapping[str, str] = field(default_factory=dict)
    kernels: str = ""
    model: str = ""
    quantisation: str = ""
    kv_bits: int = 16
    drafter: str = ""
    batch: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "packages": dict(sorted(self.packages.items()))}

    @property
    def digest(self) -> str:
        """Short name of the key, the same on every run."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def key_for(
    *,
    model: str,
    quantisation: str = "",
    kv_bits: int = 16,
    drafter: str = "",
    kernels: str = "",
    batch: int = 1,
) -> Key:
    """A key of this machine and these packages for a set-up; arguments as in `Key`."""
    return Key(
        device=device(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        mlx=version("mlx"),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        kernels=kernels,
        model=model,
        quantisation=quantisation,
        kv_bits=kv_bits,
        drafter=drafter,
        batch=batch,
    )


def device() -> str:
    """The device that MLX computes on: name and memory, or processor and cores."""
    if mx.default_device() == mx.cpu:
        return f"{_processor()}, {os.cpu_count()} cores"
    info = mx.device_info()
    name = info.get("device_name", info.get("architecture", "unknown"))
    return f"{name}, {info.get('memory_size', 0)} bytes"


def model_identity(folder: Path) -> str:
    """Identity of a checkpoint: from what its files contain, not from where they lie.

    Reads the configuration and the beginning and the end of each weight file, with its size: two
    trainings of one architecture differ, two copies of one checkpoint do not.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    for path in files:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_HEAD))
            stream.seek(max(0, size - _TAIL))
            digest.update(stream.read(_TAIL))
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
