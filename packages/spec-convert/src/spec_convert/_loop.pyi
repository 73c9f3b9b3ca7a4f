"""The compiled loop of `_loop.c`; absent where no compiler was found at installation."""

from typing_extensions import Buffer

def repack(
    kind: int, blocks: Buffer, codes: Buffer, scales: Buffer, biases: Buffer = ..., /
) -> bool:
    """Fill codes, scales and biases from whole blocks.

    Args:
        kind: number of the GGUF type.
        blocks: contiguous bytes of n blocks.
        codes: writable, contiguous, as long as the codes of n blocks.
        scales: the same for scales; 4 bytes a scale make them float32, 2 float16, 1 e8m0.
        biases: as long as `scales`; left out for block floating point.

    Returns:
        Whether every scale is a number and every bias fits; otherwise what was filled is
        meaningless.

    Raises:
        ValueError: no loop for this type, or lengths that do not belong together.
        TypeError, BufferError: a buffer that is not contiguous or may not be written.
    """
