"""Peak memory does not grow with the file: measured in a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

Kind = gguf.GGMLQuantizationType
CODE = """
import sys
from pathlib import Path
from spec_convert import convert
report = convert(sys.argv[1], sys.argv[2], raw_names=True)
# Not ru_maxrss, which a child inherits from the process that started it.
status = Path("/proc/self/status").read_text().splitlines()
peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(report.bytes_before, int(peak) // 1024)
"""


def sparse_file(path: Path, gigabytes: float, kind: Kind, n_tensors: int) -> int:
    """A file of zero blocks that takes no room on disk; returns the bytes of its tensors."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    row = 4096 // block * size
    n_rows = int(gigabytes * 1e9 / n_tensors / row)
    writer = gguf.GGUFWriter(path, "any")
    for index in range(n_tensors):
        # The shape of uint8 data is that of the stored bytes.
        writer.add_tensor_info(
            f"t{index}.weight", (n_rows, row), np.dtype(np.uint8), n_rows * row, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    padded = -(-n_rows * row // 32) * 32
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(-(-file.tell() // 32) * 32 + n_tensors * padded)
    return n_tensors * n_rows * row


def peak_megabytes(source: Path, out: Path, n_bytes: int) -> int:
    command = [sys.executable, "-c", CODE, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    source.unlink()
    read, peak = map(int, done.stdout.split())
    assert read == n_bytes
    return peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.BF16], ids=lambda kind: kind.name)
def test_a_large_tensor_takes_no_more_memory_than_a_small_one(tmp_path, kind):
    n_bytes = sparse_file(tmp_path / "big.gguf", 0.2, kind, 1)
    assert peak_megabytes(tmp_path / "big.gguf", tmp_path / "out", n_bytes) < 120


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_gigabytes_take_less_than_one_gigabyte_of_memory(tmp_path):
    n_bytes = sparse_file(tmp_path / "big.gguf", 10, Kind.Q4_1, 5)
    assert peak_megabytes(tmp_path / "big.gguf", tmp_path / "out", n_bytes) < 1000
