"""Whether a model fits into this machine's memory, asked before any of it is read."""

import os

import mlx.core as mx

from spec_core.errors import LoadError


def machine_bytes() -> int:
    """Bytes of memory that the default device can use at most; on a CPU, all of the machine's."""
    found = mx.device_info().get("memory_size")
    if isinstance(found, int) and found > 0:
        return found
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_without_room(where: str, what: str, n_bytes: int) -> None:
    """Refuse what cannot fit beside the arrays that are held already.

    Args:
        where: Opens the message.
        what: What is about to be loaded, for the message.
        n_bytes: What it needs at least.

    Raises:
        LoadError: it is more than the machine has left.
    """
    total, held = machine_bytes(), mx.get_active_memory()
    if n_bytes + held > total:
        raise LoadError(
            f"[{where}] {what} needs {n_bytes} bytes of memory ({n_bytes / 2**30:.1f} GiB), got "
            f"{max(total - held, 0)} ({total / 2**30:.1f} GiB in this machine, {held / 2**30:.1f} "
            "of them in use). Use a smaller model, fewer bits, or a larger machine."
        )
