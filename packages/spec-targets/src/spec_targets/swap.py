"""Swap the class of one module instance for a subclass of it, and put it back.

How this package looks into a running model: parameters, `isinstance`, other instances and the class
itself stay as they are. Python looks `__call__` up on the type, so an attribute on the instance
would not be seen.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.nn as nn


class Swaps:
    """The swaps made on one model, in order, so that they can be undone."""

    def __init__(self) -> None:
        self._made: list[tuple[nn.Module, type]] = []

    def swap(self, module: nn.Module, methods: dict[str, Callable[..., Any]]) -> None:
        """Give `module` a subclass of its class that has these methods."""
        original = type(module)
        module.__class__ = type(original.__name__, (original,), methods)
        self._made.append((module, original))

    def undo(self) -> None:
        """Give every module the class back that it had before the first swap."""
        for module, original in reversed(self._made):
            module.__class__ = original
        self._made.clear()


def rebind(cls: type, name: str, replacement: Callable[..., Any]) -> dict[str, FunctionType]:
    """The methods of a class that use a module-level function, made to use another one.

    Args:
        cls: A model's class.
        name: Global name of the function inside the class's module.
        replacement: What it means in the methods returned.

    Returns:
        Method name -> new function with the same code; the class is unchanged.

    Raises:
        LookupError: no method uses the name.
    """
    methods: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        for method_name, method in vars(base).items():
            if isinstance(method, FunctionType) and name in method.__code__.co_names:
                scope = {**method.__globals__, name: replacement}
                copy = FunctionType(
                    method.__code__, scope, method_name, method.__defaults__, method.__closure__
                )
                copy.__kwdefaults__ = method.__kwdefaults__
                methods[method_name] = copy
    if not methods:
        raise LookupError(f'[swap] No method of {cls.__name__} calls "{name}".')
    return methods
