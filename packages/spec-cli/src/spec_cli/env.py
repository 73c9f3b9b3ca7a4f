"""The only place that reads environment variables."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platformdirs


def prepare_mlx() -> None:
    """What MLX's CUDA backend must know before it starts.

    No CUDA graphs: MLX keeps them by their operations and by which of these share buffers, which
    depends on what was computed before, so blocks of changing width make new ones for ever: a round
    of eight sequences takes several times as long with them (docs/benchmarks/server.md). For who
    wants them, room for more, and no count of them over the whole life of a process, after which
    each further one fails ("Cache thrashing"). And a folder for compiled kernels that outlives the
    next start of the machine, as the temporary folder does not. What is set to nothing counts as
    not set: MLX would keep no kernels, and graphs for none.
    """
    wanted = {
        "MLX_USE_CUDA_GRAPHS": "0",
        "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
        "MLX_PTX_CACHE_DIR": str(cuda_modules()),
    }
    os.environ |= {name: value for name, value in wanted.items() if not os.environ.get(name)}


def multiply_in_float32() -> None:
    """Have MLX take float32 products in float32, where it would in TF32 (CUDA, newer Macs).

    TF32 keeps ten bits of the mantissa. CUDA multiplies blocks of rows in it, and a single row
    mostly in float32. MLX asks once, at the first product of the process.
    """
    os.environ["MLX_ENABLE_TF32"] = "0"


def cuda_modules() -> Path:
    """MLX_PTX_CACHE_DIR, where MLX keeps and finds compiled CUDA kernels, else a folder of ours."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        of_mlx = version("mlx")  # MLX's own kernels lie there under names without a version
    except PackageNotFoundError:
        of_mlx = "unknown"
    return cache_dir() / "cuda" / of_mlx


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
