"""The only reads from the device. Each caller says why with a `# sync:` comment."""

import mlx.core as mx


def host_ints(array: mx.array) -> list[int]:
    """Evaluate a 1-d integer array and return it as Python ints; waits for the device."""
    values: list[int] = array.tolist()  # pyright: ignore[reportAssignmentType]
    return values


def host_int(array: mx.array) -> int:
    """Evaluate a 0-d integer array and return it as a Python int; waits for the device."""
    return int(array.item())
