"""What this machine is, for reports and stamps."""

import platform
from importlib.metadata import version
from typing import Any


def backend() -> str:
    """The MLX backend in use: "metal", "cuda" or "cpu"."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def describe() -> dict[str, Any]:
    """System, Python, MLX version, backend and device.

    Raises:
        RuntimeError: MLX does not compute.
    """
    import mlx.core as mx

    total = mx.arange(4).sum().item()  # sync: proves that the backend computes
    if total != 6:
        raise RuntimeError(f"0 + 1 + 2 + 3 gave {total}")
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "backend": backend(),
    }
    if found["backend"] != "cpu":
        device = mx.device_info()
        found["device"] = device.get("device_name", device.get("architecture", "unknown"))
        found["memory_bytes"] = device.get("memory_size")
    return found
