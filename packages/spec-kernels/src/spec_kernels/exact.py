"""Whether every operation of a model gives a row the same bits whatever the rows beside it.

On a GPU a whitelist: layers whose arithmetic is known to be row by row pass, matmuls and attention
are replaced by the kernels, everything else is refused by name. On a CPU the stock operations are
row by row as long as the BLAS is, which is probed. Knows MLX's layers, no model family.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from spec_kernels._build import MAX_ROWS, ExactError
from spec_kernels.attention_layers import attention_function
from spec_kernels.layers import EMBEDDING, LINEAR

_ROWS = (1, 2, 3, 5, 8, 9, MAX_ROWS["cpu"])


def row_invariant(operation: Callable[[mx.array], mx.array], rows: mx.array) -> bool:
    """Whether `operation` gives each row of `rows` the same bits at several row counts.

    Args:
        operation: (M, K) -> (M, N), for any M.
        rows: (16, K) inputs.

    Returns:
        True if M = 1, 2, 3, 5, 8, 9 and 16 agree bit for bit.
    """
    full = operation(rows)
    return all(bool(mx.array_equal(operation(rows[:m]), full[:m])) for m in _ROWS)


def require_row_invariant(model: nn.Module, where: str, attention_name: str) -> None:
    """Refuse a model one of whose operations depends on the number of rows.

    Args:
        model: the model.
        where: backend: on "cpu" stock operations are probed, elsewhere the kernels replace them.
        attention_name: the function that attention layers call.

    Raises:
        ExactError: naming the operation.
    """
    if where == "cpu":
        _probe_cpu(model)
        return
    attends = False
    for path, layer in model.named_modules():
        reason = _refusal(layer)
        if reason:
            raise ExactError(f'[exact] "{path}" must work row by row, got {reason}.')
        attends = attends or attention_function(layer, attention_name) is not None
    if not attends:
        raise ExactError(
            f'[exact] attention must go through "{attention_name}", '
            "got a model that never calls it."
        )


def _refusal(layer: nn.Module) -> str | None:
    name = type(layer).__name__
    if "Switch" in name:
        return f"{name}: gather_qmm sorts rows by expert"
    if isinstance(layer, (*LINEAR, *EMBEDDING, nn.RMSNorm, nn.LayerNorm)):
        return None
    own = [key for key, value in layer.items() if isinstance(value, mx.array)]
    known = "rope" in name.lower() or "norm" in name.lower()
    if own and not known:
        return f"{name}, which holds {', '.join(own)} itself"
    return None


def _probe_cpu(model: nn.Module) -> None:
    """Stock matmul on this CPU: a preloaded BLAS may round by the shape of the call."""
    dtypes = {
        layer["weight"].dtype
        for _, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Embedding))
    }
    for dtype in sorted(dtypes or {mx.float32}, key=str):
        x = mx.random.normal((_ROWS[-1], 320), key=mx.random.key(0)).astype(dtype)
        w = mx.random.normal((200, 320), key=mx.random.key(1)).astype(dtype)
        if not row_invariant(lambda x, w=w: x @ w.T, x):
            raise ExactError(
                "[exact] matmul must give a row the same bits at every width, got a BLAS that does "
                "not. Use MLX's own, or the library that tools/cpu-blas builds."
            )
