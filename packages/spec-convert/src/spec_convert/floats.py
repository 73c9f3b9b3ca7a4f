"""Rows of any GGUF type as float32, float16 or bfloat16.

Dequantisation itself is the `gguf` package's; this module adds plain floating-point types and
rounding to nearest even. Knows nothing about names or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from spec_convert.errors import ConvertError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FloatType:
    """A floating-point storage type.

    Attributes:
        tag: name in a safetensors header.
        dtype: numpy type that holds its bits.
    """

    tag: str
    dtype: str


F32 = FloatType("F32", "<f4")
F16 = FloatType("F16", "<f2")
BF16 = FloatType("BF16", "<u2")
INTEGERS = {Kind.I8: "I8", Kind.I16: "I16", Kind.I32: "I32", Kind.I64: "I64"}
BY_NAME = {"f32": F32, "f16": F16, "bf16": BF16}
PLAIN = {Kind.F32: F32, Kind.F16: F16, Kind.BF16: BF16}

_INTEGER_DTYPES = {Kind.I8: "<i1", Kind.I16: "<i2", Kind.I32: "<i4", Kind.I64: "<i8"}


def to_float32(rows: Array, kind: Kind) -> Array:
    """Values of raw rows.

    Args:
        rows: shape (n, row bytes), uint8.
        kind: their GGUF type.

    Returns:
        Shape (n, K), float32.

    Raises:
        ConvertError: no dequantiser exists for `kind`.
    """
    if kind in _INTEGER_DTYPES:
        return to_integers(rows, kind).astype(np.float32)
    if kind is Kind.F64:
        return rows.view("<f8").astype(np.float32)
    try:
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be NaN
            return quants.dequantize(np.ascontiguousarray(rows), kind)
    except NotImplementedError as error:
        raise ConvertError(
            f"[repack] Storage type {kind.name} has no dequantiser in the installed `gguf` "
            "package. Update it, or use a file in another type."
        ) from error


def to_integers(rows: Array, kind: Kind) -> Array:
    """Whole numbers of raw rows of an integer type; shape (n, K), int64."""
    return rows.view(_INTEGER_DTYPES[kind]).astype("<i8")


def encode(values: Array, target: FloatType) -> Array:
    """Round float32 values to a storage type, to nearest even.

    Args:
        values: float32, any shape.
        target: the storage type.

    Returns:
        Same shape; float32, float16, or uint16 holding bfloat16 bits.

    Raises:
        ConvertError: a finite value is too large for float16.
    """
    if target is F32:
        return values.astype("<f4", copy=False)
    if target is BF16:
        return _to_bfloat16(values)
    with np.errstate(over="ignore"):
        narrow = values.astype("<f2")
    if np.isinf(narrow).any() and np.isfinite(values[np.isinf(narrow)]).any():
        raise ConvertError(
            f"[repack] Values must be within 65504 for f16, got {np.abs(values).max():g}. "
            "Use --dtype bf16 or f32."
        )
    return narrow


def decode(stored: Array, target: FloatType) -> Array:
    """The float32 values of what `encode` returned."""
    if target is BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _to_bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")
