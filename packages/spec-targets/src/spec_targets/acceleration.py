"""The few-row kernels of spec-kernels in a loaded model: which shapes get them, and from where.

Knows what a checkpoint's config says about attention; everything else is spec-kernels' business.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from spec_core import LoadError
from spec_kernels import ExactError, Installed, install
from spec_kernels.installation import Mode


def install_kernels(
    network: nn.Module,
    config: Mapping[str, Any],
    *,
    mode: Mode = "auto",
    exact: bool = False,
    verdicts: Path | None = None,
) -> Installed:
    """Race the kernels on the model's shapes and install those that win.

    Args:
        network: The loaded model; changed in place.
        config: The text part of its config.
        mode: "auto", "on" (also on a device that the rules leave out) or "off".
        exact: Serve every row count, so that a row's bits do not depend on its neighbours.
        verdicts: File that keeps the outcome of races; None races again in every process.

    Raises:
        LoadError: `exact` was asked for, and some operation cannot give it; names it.
    """
    try:
        return install(
            network, mode=mode, exact=exact, cache=verdicts, attention_shape=_heads(config)
        )
    except ExactError as error:
        raise LoadError(str(error)) from error


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Query heads, key heads and head size, where the config names them."""
    n_heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not n_heads or not width:
        return None
    head_dim = config.get("head_dim") or width // n_heads
    return n_heads, config.get("num_key_value_heads") or n_heads, head_dim
