"""The only place that reads environment variables."""

import os
from pathlib import Path

import platformdirs


def prepare_mlx() -> None:
    """Room for the graphs of blocks of every width, before MLX reads its settings.

    MLX's CUDA backend keeps one graph per topology and gives up ("Cache thrashing") once twice its
    capacity of them had to be made; speculation makes one set for every block width.
    """
    os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "2000")


def debug() -> bool:
    """SPEC_DEBUG=1 shows tracebacks."""
    return os.environ.get("SPEC_DEBUG", "") not in ("", "0")


def cache_dir() -> Path:
    """SPEC_CACHE_DIR, else the user's cache folder; not created here."""
    chosen = os.environ.get("SPEC_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("spec"))


def kernel_verdicts() -> Path:
    """Where it is kept which kernels win on this machine."""
    return cache_dir() / "kernels.json"


def calibration_dir() -> Path:
    """Where measured cost curves are kept."""
    return cache_dir() / "calibration"


def preloaded() -> str:
    """LD_PRELOAD, which decides about the BLAS on Linux CPU."""
    return os.environ.get("LD_PRELOAD", "")


def built_blas() -> Path:
    """Where tools/cpu-blas/build puts its library; it does not ask SPEC_CACHE_DIR."""
    return Path(platformdirs.user_cache_dir("spec")) / "cpu-blas" / "libspec_blas.so"


def api_key() -> str | None:
    """SPEC_API_KEY, so that a server's key need not stand in a command line."""
    return os.environ.get("SPEC_API_KEY")
