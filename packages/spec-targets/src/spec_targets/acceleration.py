"""The few-row kernels of spec-kernels in a loaded target: which shapes get them, and from where.

Knows what a checkpoint's config says about attention and how to run a target's forward; everything
else is spec-kernels' business.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import LoadError
from spec_kernels import ExactError, Installed, install
from spec_kernels.installation import Mode

_CONTEXT = 64  # tokens before the raced blocks


def install_kernels(
    target: Any,
    config: Mapping[str, Any],
    *,
    mode: Mode = "auto",
    exact: bool = False,
    verdicts: Path | None = None,
) -> Installed:
    """Race the kernels on the model's shapes and its forwards, and install what wins.

    Args:
        target: The loaded `MlxTarget`; its model is changed in place.
        config: The text part of its config.
        mode: "auto", "on" (also on a device that the rules leave out) or "off".
        exact: Serve every row count, so that a row's bits do not depend on its neighbours.
        verdicts: File that keeps the outcome of races; None races again in every process.

    Raises:
        LoadError: `exact` was asked for, and some operation cannot give it; names it.
    """
    try:
        return install(
            target.model,
            mode=mode,
            exact=exact,
            cache=verdicts,
            attention_shape=_heads(config),
            forward=_forward_of(target),
        )
    except ExactError as error:
        raise LoadError(str(error)) from error


def _forward_of(target: Any) -> Callable[[int], None]:
    """Runs blocks of so many rows behind a short context; the cache is made at the first call."""
    cache: list[Any] = []

    def forward(rows: int) -> None:
        if not cache:
            cache.append(target.make_cache())
            target.prefill([i % target.vocab_size for i in range(_CONTEXT)], cache[0])
        block = mx.arange(rows, dtype=mx.int32) % target.vocab_size
        output = target.verify(block, cache[0])
        mx.eval(mx.argmax(output.logits, axis=-1))  # sync: the forward is what is timed
        target.commit(cache[0], 0)

    return forward


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Query heads, key heads and head size, where the config names them."""
    n_heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not n_heads or not width:
        return None
    head_dim = config.get("head_dim") or width // n_heads
    return n_heads, config.get("num_key_value_heads") or n_heads, head_dim
