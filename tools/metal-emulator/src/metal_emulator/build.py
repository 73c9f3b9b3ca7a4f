"""Compiles rewritten kernel text with g++ into cached shared objects.

Everything is keyed by content: the shim, the flags and the text. Knows the compiler, not the
kernels.
"""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from metal_emulator.errors import EmulatorError

SHIM = Path(__file__).parent / "shim"
INCLUDE = Path(mx.__file__).parent / "include"
DEFAULT_CACHE = Path.home() / ".cache" / "spec" / "metal-emulator"

_BASE = (
    "-std=gnu++17 -march=native -fPIC -fvisibility=hidden -fno-strict-aliasing -fwrapv "
    "-fsingle-precision-constant -ffp-contract=off -w"
).split()
_CHECK = (
    "-fsanitize=thread -fsanitize=alignment,bounds -DEMU_CHECK -ftrivial-auto-var-init=pattern -g1"
).split()


@functools.cache
def missing_tools() -> str | None:
    """Why this machine cannot run the emulator, or None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the Metal emulator needs Linux on x86-64, got {platform.platform()}"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    absent = [flag for flag in ("avx2", "fma", "f16c") if f" {flag}" not in flags]
    if absent:
        return f"the Metal emulator needs a processor with {', '.join(absent)}"
    if shutil.which("g++") is None:
        return "the Metal emulator needs g++ 12 or newer, got none"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True)
    if int(version.stdout.split(".")[0]) < 12:
        return f"the Metal emulator needs g++ 12 or newer, got {version.stdout.strip()}"
    return None


@functools.cache
def _shim_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SHIM.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    digest.update(metadata.version("mlx").encode())
    return digest.hexdigest()[:12]


def _flags(optimise: int, check: bool) -> list[str]:
    include = ["-I", str(SHIM), "-I", str(INCLUDE), "-DEMU_MLX_UTILS"]
    return [*_BASE, f"-O{optimise}", *include, *(_CHECK if check else ())]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError("[build] The kernel does not compile:\n" + done.stderr[:6000])


@functools.cache
def _support(cache: Path, optimise: int, check: bool) -> tuple[Path, Path]:
    """The runtime's object, and a folder with the shim precompiled for these flags."""
    cache.mkdir(parents=True, exist_ok=True)
    runtime = cache / f"runtime-{_shim_digest()}.o"
    if not runtime.exists():
        flags = "-std=gnu++17 -O2 -march=native -fPIC -fvisibility=hidden -w".split()
        source = SHIM / "emu_rt.cpp"
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            made = Path(fresh) / "runtime.o"
            _run(["g++", *flags, "-I", str(SHIM), "-c", str(source), "-o", str(made)])
            made.replace(runtime)
    folder = cache / f"shim-{_shim_digest()}-{optimise}{int(check)}"
    compiled = folder / "emu_pre.h.gch"
    if not compiled.exists():
        folder.mkdir(exist_ok=True)
        header = folder / "emu_pre.h"
        header.write_text((SHIM / "emu_pre.h").read_text(encoding="utf-8"), encoding="utf-8")
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            made = Path(fresh) / "emu_pre.h.gch"
            flags = _flags(optimise, check)
            _run(["g++", *flags, "-x", "c++-header", str(header), "-o", str(made)])
            made.replace(compiled)
    return runtime, folder


@functools.cache
def compile_kernel(text: str, name: str, cache: Path, optimise: int, check: bool) -> ctypes.CDLL:
    """The shared object of one specialisation, compiled unless the cache has it.

    Args:
        text: the C++ text, launcher included.
        name: for the file's name.
        cache: folder of compiled objects.
        optimise: level of -O.
        check: whether every access is instrumented.

    Raises:
        EmulatorError: the text does not compile.
    """
    key = hashlib.sha256(f"{text}\0{optimise}{check}{_shim_digest()}".encode()).hexdigest()[:20]
    library = cache / f"{name[:40]}-{key}.so"
    if not library.exists():
        runtime, folder = _support(cache, optimise, check)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            source, made = Path(fresh) / "kernel.cpp", Path(fresh) / "kernel.so"
            source.write_text(text, encoding="utf-8")
            flags = ["-I", str(folder), *_flags(optimise, check), "-include", "emu_pre.h"]
            _run(["g++", *flags, "-c", str(source), "-o", f"{made}.o"])
            # Linked without the sanitizers: the runtime has hooks of its own.
            _run(["g++", "-shared", "-o", str(made), f"{made}.o", str(runtime)])
            made.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.emu_alloc.restype = ctypes.c_void_p
    loaded.emu_alloc.argtypes = [ctypes.c_uint64]
    loaded.emu_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return loaded
