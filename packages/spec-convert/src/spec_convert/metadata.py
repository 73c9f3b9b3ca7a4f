"""Typed look-up of GGUF metadata: a wrong type is refused by key, never passed on.

Knows nothing about which keys a model needs, and nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from spec_convert.errors import ConvertError, quote

T = TypeVar("T")
Scalar = bool | int | float | str
Value = Scalar | list[str] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Metadata:
    """Key-value section of a GGUF file.

    Attributes:
        values: every entry; numeric arrays are numpy arrays, string arrays are lists.
    """

    values: Mapping[str, Value]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: T) -> str | T: ...
    def text(self, key: str, default: object = ...) -> object:
        """String at `key`; `default` where absent, an error without a default."""
        value = self._get(key, default)
        return self._check(key, value, default, isinstance(value, str), "a string")

    @overload
    def integer(self, key: str) -> int: ...
    @overload
    def integer(self, key: str, default: T) -> int | T: ...
    def integer(self, key: str, default: object = ...) -> object:
        """Whole number at `key`; `default` where absent, an error without a default."""
        value = self._get(key, default)
        good = isinstance(value, int) and not isinstance(value, bool)
        return self._check(key, value, default, good, "a whole number")

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: T) -> float | T: ...
    def number(self, key: str, default: object = ...) -> object:
        """Finite number at `key`; `default` where absent, an error without a default."""
        value = self._get(key, default)
        good = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        return self._check(key, value, default, good, "a finite number")

    @overload
    def flag(self, key: str) -> bool: ...
    @overload
    def flag(self, key: str, default: T) -> bool | T: ...
    def flag(self, key: str, default: object = ...) -> object:
        """Boolean at `key`; `default` where absent, an error without a default."""
        value = self._get(key, default)
        return self._check(key, value, default, isinstance(value, bool), "a boolean")

    def texts(self, key: str) -> list[str]:
        """Array of strings at `key`; empty where absent."""
        value = self._get(key, None)
        if value is None:
            return []
        if isinstance(value, np.ndarray) and value.size == 0:
            return []
        if not isinstance(value, list):
            raise self._mismatch(key, value, "an array of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """Array of whole numbers at `key`; empty where absent."""
        value = self._get(key, None)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self._mismatch(key, value, "an array of whole numbers")
        return [int(item) for item in value.tolist()]

    def numbers(self, key: str) -> list[float]:
        """Array of floating-point numbers at `key`; empty where absent."""
        value = self._get(key, None)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            raise self._mismatch(key, value, "an array of floating-point numbers")
        return [float(item) for item in value.tolist()]

    def flags(self, key: str) -> list[bool]:
        """Array of booleans at `key`; empty where absent."""
        value = self._get(key, None)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind != "b":
            raise self._mismatch(key, value, "an array of booleans")
        return [bool(item) for item in value.tolist()]

    def _get(self, key: str, default: object) -> object:
        if key in self.values:
            return self.values[key]
        if default is ...:
            raise ConvertError(
                f"[metadata] The file must hold {quote(key)}, which is missing. "
                "Use a file written by a complete converter."
            )
        return default

    def _check(self, key: str, value: object, default: object, good: bool, kind: str) -> object:
        if good or (key not in self.values and value is default):
            return value
        raise self._mismatch(key, value, kind)

    def _mismatch(self, key: str, value: object, kind: str) -> ConvertError:
        return ConvertError(
            f"[metadata] {quote(key)} must be {kind}, got {_describe(value)}. "
            "The file does not follow the GGUF conventions for this key."
        )


def _describe(value: object) -> str:
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype} values"
    if isinstance(value, str):
        return f"the string {quote(value)}"
    return f"{type(value).__name__} {value}"
