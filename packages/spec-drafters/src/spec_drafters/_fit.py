"""Refusals that every head shares: a target of another depth, or one that cannot be tapped."""

import mlx.core as mx

from spec_core import LoadError, Target


def check_taps(
    where: str, taps: tuple[int, ...], n_target_layers: int | None, target: Target
) -> None:
    """Refuse a head whose taps do not fit the target.

    Args:
        where: Family name that opens messages.
        taps: Layers it reads, ascending.
        n_target_layers: Depth of the target it was made for, or None where it does not say.
        target: The model it is to draft for.

    Raises:
        LoadError: the depths differ, or the target cannot be tapped.
    """
    if target.tap_refusal is not None:
        raise LoadError(
            f"[{where}] The drafter reads hidden states of the target, which cannot be tapped: "
            f"{target.tap_refusal}. Use lookup or a draft model."
        )
    deep = n_target_layers is not None and n_target_layers != target.n_layers
    if deep or taps[0] < 0 or taps[-1] >= target.n_layers:
        made_for = "its target" if n_target_layers is None else f"a {n_target_layers}-layer target"
        raise LoadError(
            f"[{where}] Checkpoint taps layers {taps} of {made_for}, got a target with "
            f"{target.n_layers} layers. Use the drafter made for it."
        )


def rounded_to_bf16(value: float) -> float:
    """The nearest bf16 number."""
    rounded = mx.array([value]).astype(mx.bfloat16).astype(mx.float32)
    values: list[float] = rounded.tolist()  # pyright: ignore[reportAssignmentType]
    return values[0]  # sync: once, at load
