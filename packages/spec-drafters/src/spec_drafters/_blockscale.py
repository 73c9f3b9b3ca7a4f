"""FP8 and FP4 matrices with power-of-two scales, as DeepSeek stores them, in MLX's packing.

An FP8 (E4M3) matrix has one scale per square block, MLX's "mxfp8" one per 32 columns of every row:
the scales are repeated and no weight changes. An FP4 (E2M1) matrix is MLX's "mxfp4" as it lies.

References:
    OCP Microscaling Formats 1.0: E8M0 scales, E4M3 and E2M1 elements. DeepSeek-V4 inference code:
    blocks of 128 x 128 (V4) and 32 x 32 (V4.1), FP4 experts with a scale per 32 columns.
"""

from functools import cache

import mlx.core as mx

from spec_core import LoadError
from spec_drafters._linear import Quantised

GROUP = 32  # columns that share a scale in MLX's packing
_BLOCKS = (128, 32)
_NAN = 255  # the E8M0 code that is no number


def repack(
    name: str, weight: mx.array, scale: mx.array, n_out: int, n_in: int, where: str
) -> tuple[mx.array, Quantised]:
    """A stored matrix and its scales as MLX multiplies them.

    Args:
        name: Base name, for messages.
        weight: Bytes: (out, in) E4M3, or (out, in / 2) with two E2M1 codes each, low nibble first.
        scale: E8M0 codes as uint8, or powers of two as floats.
        n_out: Rows.
        n_in: Columns.
        where: Family name that opens messages.

    Returns:
        Packed weight, (out, in * bits / 32) uint32, and its packing.

    Raises:
        LoadError: weight or scales have another type or shape.
    """

    def refuse(must: str, got: object) -> LoadError:
        return LoadError(f'[{where}] "{name}" must {must}, got {got}. Download it again.')

    if weight.dtype not in (mx.uint8, mx.int8):
        raise refuse("hold 8-bit codes beside its scales", weight.dtype)
    if n_in % GROUP:
        raise refuse(f"have a multiple of {GROUP} columns", n_in)
    codes = scale if scale.dtype == mx.uint8 else _exponents(scale)
    if tuple(weight.shape) == (n_out, n_in // 2):
        if tuple(codes.shape) != (n_out, n_in // GROUP):
            wanted = (n_out, n_in // GROUP)
            raise refuse(f'have a "scale" of shape {wanted} (FP4)', tuple(codes.shape))
        packing = Quantised(codes, None, GROUP, 4, "mxfp4")
    elif tuple(weight.shape) == (n_out, n_in):
        shapes = {b: (-(-n_out // b), -(-n_in // b)) for b in _BLOCKS}
        block = next((b for b in _BLOCKS if tuple(codes.shape) == shapes[b]), None)
        if block is None:
            wanted = " or ".join(str(shape) for shape in shapes.values())
            raise refuse(f'have a "scale" of shape {wanted} (FP8)', tuple(codes.shape))
        packing = Quantised(_spread(codes, block, n_out, n_in), None, GROUP, 8, "mxfp8")
    else:
        wanted = f"have shape {(n_out, n_in)} in FP8 or {(n_out, n_in // 2)} in FP4"
        raise LoadError(
            f'[{where}] "{name}.weight" must {wanted} to fit config.json and the target, got '
            f"{tuple(weight.shape)}. Use the drafter made for this target."
        )
    return weight.view(mx.uint32), packing


@cache
def refuse_without_kernels(mode: str, bits: int, where: str) -> None:
    """Multiply tiny packed matrices; a device without the kernels says so here, not while drafting.

    Raises:
        LoadError: MLX has no such product on this device.
    """
    try:
        weight, scales = mx.quantize(mx.zeros((2, GROUP, GROUP)), GROUP, bits, mode)
        kind = {"group_size": GROUP, "bits": bits, "mode": mode}
        x, picked = mx.zeros((1, 1, 1, GROUP)), mx.zeros((1, 1), mx.int32)
        mx.eval(mx.quantized_matmul(x, weight[0], scales[0], **kind))
        mx.eval(mx.gather_qmm(x, weight, scales, rhs_indices=picked, **kind))
    except (ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise LoadError(
            f'[{where}] Draft stages in "{mode}" need products that MLX must have on this device, '
            f"and says: {reason}. Load them in 16 bits."
        ) from error


def refuse_bad_scales(scales: list[tuple[str, mx.array]], where: str) -> None:
    """Refuse scales that are no numbers; reads one number per matrix.

    Raises:
        LoadError: the first matrix whose scales hold the code for "not a number".
    """
    if not scales:
        return
    largest: list[int] = mx.stack([codes.max() for _, codes in scales]).tolist()  # type: ignore[assignment]
    for (name, _), code in zip(scales, largest, strict=True):  # sync: once, at load
        if code == _NAN:
            raise LoadError(
                f'[{where}] The scales of "{name}" must be numbers, got E8M0 code {_NAN} (not a '
                "number). The file is damaged; download it again."
            )


def _exponents(scale: mx.array) -> mx.array:
    """Powers of two as E8M0 codes; what is none becomes the code for "not a number"."""
    value = scale.astype(mx.float32)
    exponent = mx.round(mx.log2(value))
    exact = (mx.power(2.0, exponent) == value) & (mx.abs(exponent) <= 127)
    return mx.where(exact, exponent + 127, _NAN).astype(mx.uint8)


def _spread(codes: mx.array, block: int, n_out: int, n_in: int) -> mx.array:
    """One code per block to one per 32 columns of every row."""
    rows = mx.repeat(codes, block, axis=0)[:n_out]
    return mx.repeat(rows, block // GROUP, axis=1)[:, : n_in // GROUP]
