"""Finds drafters and targets from any installed distribution by entry point.

A plugin is imported only when its name is asked for.
"""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from spec_core.errors import LoadError

DRAFTERS = "spec_core.drafters"
TARGETS = "spec_core.targets"
LOADERS = "spec_core.loaders"  # "target" and "drafter": from a name or folder to a ready object


def names(group: str) -> list[str]:
    """Names installed under an entry-point group, sorted; imports nothing."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """Import and return what the entry point `name` of `group` stands for.

    Raises:
        LoadError: no such name, or its module does not import; the message lists the installed
            names and the nearest one.
    """
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        raise LoadError(_unknown(group, name))
    if len({entry.value for entry in found}) > 1:
        raise LoadError(
            f'[registry] "{name}" must be claimed by one distribution, got '
            f"{', '.join(sorted(_origin(e) for e in found))}. Uninstall all but one."
        )
    try:
        return found[0].load()
    except Exception as error:  # a plugin's import may raise anything
        raise LoadError(
            f'[registry] "{name}" must be importable, got "{error}" from {_origin(found[0])}. '
            "Reinstall that distribution."
        ) from error


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _unknown(group: str, name: str) -> str:
    kind = group.rsplit(".", 1)[-1].removesuffix("s")
    installed = names(group)
    listed = ", ".join(f'"{n}"' for n in installed) or "none"
    near = difflib.get_close_matches(name, installed, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    return f'[registry] No {kind} "{name}". Installed: {listed}.{hint}'
