"""`isinstance` with a protocol that reads no member: to read one may mean to measure it."""

from inspect import getattr_static
from typing import Protocol


class ByName(type(Protocol)):
    """Looks a protocol's members up by name, as from Python 3.12 on; Python 3.11 reads them."""

    def __instancecheck__(cls, instance: object) -> bool:
        if not getattr(cls, "_is_protocol", False):  # a class that inherits from the protocol
            return super().__instancecheck__(instance)
        names = [name for name in vars(cls) if not name.startswith("_")]
        return all(getattr_static(instance, name, ByName) is not ByName for name in names)
