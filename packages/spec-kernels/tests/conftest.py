"""Emulated kernels: skipped, with the reason, where this machine cannot compile them."""

import metal_emulator
import pytest


@pytest.fixture(scope="session")
def emulator() -> None:
    """Skips a test that runs Metal text on a machine without g++ or AVX2."""
    reason = metal_emulator.missing_tools()
    if reason is not None:
        pytest.skip(reason)
