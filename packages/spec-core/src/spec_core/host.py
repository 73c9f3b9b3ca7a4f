"""The only reads from the device. Each caller says why with a `# sync:` comment."""

import struct
from collections.abc import Sequence

import mlx.core as mx


def host_ints(array: mx.array) -> list[int]:
    """Evaluate a 1-d integer array and return it as Python ints; waits for the device."""
    values: list[int] = array.tolist()  # pyright: ignore[reportAssignmentType]
    return values


def host_int(array: mx.array) -> int:
    """Evaluate a 0-d integer array and return it as a Python int; waits for the device."""
    return int(array.item())


def floats_as_ints(array: mx.array) -> mx.array:
    """The bits of float32 numbers as int32, to travel in a read of integers: (K,) -> (K,)."""
    return array.astype(mx.float32).view(mx.int32)


def ints_as_floats(values: Sequence[int]) -> tuple[float, ...]:
    """Python floats from the integers that `floats_as_ints` made of them."""
    return struct.unpack(f"={len(values)}f", struct.pack(f"={len(values)}i", *values))
