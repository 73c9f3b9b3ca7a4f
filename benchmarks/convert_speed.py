"""MB/s of `spec-convert convert` beside `cp`, per GGUF type, on one core.

    uv run benchmarks/convert_speed.py --folder FOLDER --megabytes 640 [--synced]

Synthetic files, alternating runs, medians. MB are those of the source. "cpu" is user and system
time, which a busy machine inflates less; the start of Python is measured and left out. The output
is larger than the source (scales and biases for every group), so the last column counts both: CPU
time for each byte read or written, again beside `cp`. With --synced a run ends when its output is
on the disk, and begins with a source that is not in memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
KINDS = (
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q4_K, Kind.Q5_K, Kind.MXFP4,
)  # fmt: skip
PLAIN_BYTES = {Kind.F32: 4, Kind.F16: 2, Kind.BF16: 2}
CONVERT = "from spec_convert import convert; import sys; convert(*sys.argv[1:], raw_names=True)"
NOTHING = "from spec_convert import convert"


def main() -> None:
    """Measure every type and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=640)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--synced", action="store_true", help="until the output is on the disk")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    synced = ", to the disk" if options.synced else ""
    print(f"{options.megabytes} MB, median of {options.runs}, one core{synced}")
    wall, cpu = f"{'cp MB/s':>10}{'convert':>10}", f"{'cp cpu':>10}{'cpu':>10}"
    print(f"{'type':8}{wall}{'ratio':>8}{cpu}{'ratio':>8}{'a byte':>8}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for kind in KINDS:
            source = Path(name) / "source.gguf"
            size = write(source, kind, options.megabytes) / 1e6
            print_row(kind, size, *measure(source, options.runs, synced=options.synced))


def write(path: Path, kind: Kind, megabytes: int) -> int:
    """Tensors of random codes with small scales; returns their bytes."""
    plain = PLAIN_BYTES.get(kind)
    block, size = (32, 32 * plain) if plain else gguf.GGML_QUANT_SIZES[kind]
    row = 4096 // block * size
    n_rows = 32_000_000 // row
    rows = np.random.default_rng(0).integers(0, 100, (n_rows, row), dtype=np.uint8)
    rows.reshape(-1, size)[:, 1:4:2] = 0x20
    writer = gguf.GGUFWriter(path, "any")
    count = max(1, megabytes * 1_000_000 // rows.nbytes)
    for index in range(count):
        writer.add_tensor(f"t{index}.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count * rows.nbytes


def measure(
    source: Path, runs: int, *, synced: bool
) -> tuple[float, dict[str, tuple[float, float]]]:
    """MB written, and median wall and CPU seconds of a copy, a conversion and a Python start."""
    copy, out = source.with_name("copy.gguf"), source.with_name("out")
    commands = {
        "cp": ["cp", "--reflink=never", str(source), str(copy)],
        "convert": [sys.executable, "-c", CONVERT, str(source), str(out)],
        "start": [sys.executable, "-c", NOTHING],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    written = 0.0
    for _ in range(runs):
        for name, command in commands.items():
            if synced:
                forget(source)
            times[name].append(timed(command, [copy, out] if synced else []))
            if out.exists():
                written = sum(file.stat().st_size for file in out.iterdir()) / 1e6
            copy.unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
    return written, {
        name: (statistics.median(w for w, _ in seen), statistics.median(c for _, c in seen))
        for name, seen in times.items()
    }


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: list[str], outputs: list[Path]) -> tuple[float, float]:
    """Wall and CPU seconds of a child process, until these outputs are on the disk."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True)
    for path in outputs:
        for file in path.iterdir() if path.is_dir() else [path] * path.exists():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def print_row(
    kind: Kind, size: float, written: float, medians: dict[str, tuple[float, float]]
) -> None:
    """One line of the table."""
    cells = [f"{kind.name:8}"]
    for index in (0, 1):
        copy = medians["cp"][index]
        convert = medians["convert"][index] - medians["start"][index]
        cells.append(f"{size / copy:10.0f}{size / convert:10.0f}{convert / copy:8.2f}")
        if index:
            cells.append(f"{convert / copy * 2 * size / (size + written):8.2f}")
    print("".join(cells), flush=True)


if __name__ == "__main__":
    main()
