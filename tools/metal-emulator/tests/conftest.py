"""Skips, with the reason, every test that compiles a kernel where this machine cannot."""

import metal_emulator
import pytest

COMPILES = ("test_launch", "test_planted_bugs", "test_mlx_oracle")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = metal_emulator.missing_tools()
    if reason is None:
        return
    for item in items:
        if item.path.stem in COMPILES:
            item.add_marker(pytest.mark.skip(reason=reason))
