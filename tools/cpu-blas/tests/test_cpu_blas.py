"""The preload library against numpy in float64, its row invariance, and MLX running on it."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOL = Path(__file__).parents[1]
ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112
FLOATS = ctypes.POINTER(ctypes.c_float)
# Odd on purpose: tails of the 8-wide loops, of the 12-column blocks and of the 4-row tiles.
SHAPES = [(1, 1, 1), (1, 12, 8), (2, 7, 9), (3, 13, 64), (4, 65, 31), (5, 129, 100), (40, 33, 257)]

THROUGH_MLX = """
import ctypes
import mlx.core as mx
key = mx.random.key(7)
x = mx.random.normal((40, 200), key=key)
w = mx.random.normal((130, 200), key=mx.random.key(8))
v = mx.random.normal((200, 130), key=mx.random.key(9))
for name, right in (("linear", w.T), ("values", v)):
    full = x @ right
    alike = all(mx.array_equal(x[:m] @ right, full[:m]).item() for m in range(1, 41))
    print(name, "rows alike:", alike)
    with mx.stream(mx.cpu):
        print(name, "error:", float(mx.abs(full - (x[:, :, None] * right[None]).sum(1)).max()))
calls = ctypes.c_ulong.in_dll(ctypes.CDLL(None), "spec_blas_row_calls").value
print("row calls:", calls)
big = mx.random.normal((64, 200), key=key)
print("openblas error:", float(mx.abs(big @ v - (big[:, :, None] * v[None]).sum(1)).max()))
"""


@pytest.fixture(scope="session")
def library() -> str:
    """Path of the built library; skips where this machine cannot build or run it."""
    done = subprocess.run([TOOL / "build"], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0]


def gemm(
    library: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    n: int,
    k: int,
    *,
    ta: bool = False,
    tb: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> np.ndarray:
    """cblas_sgemm on 2-d row-major arrays whose rows may be wider than the matrix they hold."""
    out = c.copy()
    function = ctypes.CDLL(library).cblas_sgemm
    function.restype = None
    m = out.shape[0]
    function(
        ROW_MAJOR,
        TRANS if ta else NO_TRANS,
        TRANS if tb else NO_TRANS,
        m,
        n,
        k,
        ctypes.c_float(alpha),
        a.ctypes.data_as(FLOATS),
        a.shape[1],
        b.ctypes.data_as(FLOATS),
        b.shape[1],
        ctypes.c_float(beta),
        out.ctypes.data_as(FLOATS),
        out.shape[1],
    )
    return out


def operands(m: int, n: int, k: int, *, ta: bool, tb: bool, pad: int = 3) -> list[np.ndarray]:
    """Random a, b and c, each row `pad` floats wider than needed."""
    rng = np.random.default_rng(m * 1000 + n * 10 + k)
    shapes = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n)]
    return [rng.standard_normal((rows, cols + pad), dtype=np.float32) for rows, cols in shapes]


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_transpose_and_stride_agrees_with_numpy(library, shape, ta, tb):
    m, n, k = shape
    a, b, c = operands(m, n, k, ta=ta, tb=tb)
    left = (a[:, :m].T if ta else a[:, :k]).astype(np.float64)
    right = (b[:, :k].T if tb else b[:, :n]).astype(np.float64)
    for alpha, beta in ((1.0, 0.0), (0.5, 2.0)):
        got = gemm(library, a, b, c, n, k, ta=ta, tb=tb, alpha=alpha, beta=beta)
        want = alpha * (left @ right) + beta * c[:, :n]
        assert np.abs(got[:, :n] - want).max() <= 2e-6 * k + 1e-6
        assert np.array_equal(got[:, n:], c[:, n:]), "wrote past the row of c"


def test_beta_zero_ignores_what_the_output_held(library):
    a, b, c = operands(3, 70, 20, ta=False, tb=True)
    poisoned = np.full_like(c, np.nan)
    got = gemm(library, a, b, poisoned, 70, 20, tb=True)[:, :70]
    assert np.array_equal(got, gemm(library, a, b, c, 70, 20, tb=True)[:, :70])


@pytest.mark.parametrize("tb", [False, True])
def test_no_columns_are_no_work(library, tb):
    program = (
        "import ctypes, sys; f, x = ctypes.CDLL(sys.argv[1]).cblas_sgemm, (ctypes.c_float * 8)(); "
        f"f(101, 111, {TRANS if tb else NO_TRANS}, 1, 0, 8, ctypes.c_float(1), x, 8, x, 8, "
        "ctypes.c_float(0), x, 1)"
    )
    done = subprocess.run([sys.executable, "-c", program, library], check=False)
    assert done.returncode == 0  # in a process of its own: a division by zero ends it


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("ta", [False, True])
def test_a_row_has_the_same_bits_at_every_width_up_to_forty(library, ta, tb):
    n, k = 131, 203
    a, b, c = operands(40, n, k, ta=ta, tb=tb, pad=0)
    full = gemm(library, a, b, c, n, k, ta=ta, tb=tb)
    for m in range(1, 40):
        part = np.ascontiguousarray(a[:, :m] if ta else a[:m])
        assert np.array_equal(gemm(library, part, b, c[:m], n, k, ta=ta, tb=tb), full[:m]), m


def test_more_rows_than_forty_go_to_openblas_and_agree_with_numpy(library):
    calls = ctypes.c_ulong.in_dll(ctypes.CDLL(library), "spec_blas_row_calls")
    before = calls.value
    a, b, c = operands(41, 50, 60, ta=False, tb=True)
    got = gemm(library, a, b, c, 50, 60, tb=True)[:, :50]
    want = a[:, :60].astype(np.float64) @ b[:, :60].astype(np.float64).T
    assert np.abs(got - want).max() < 1e-4
    assert calls.value == before


def run_mlx(library: str, program: str, blas: str = "rows") -> str:
    """Standard output of a fresh Python whose MLX runs on the library."""
    command = ["env", f"LD_PRELOAD={library}", f"SPEC_BLAS={blas}", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is a Linux mechanism")
def test_mlx_matmul_runs_on_it_and_keeps_a_rows_bits(library):
    report = dict(line.rsplit(": ", 1) for line in run_mlx(library, THROUGH_MLX).splitlines())
    assert report["linear rows alike"] == "True"
    assert report["values rows alike"] == "True"
    for name in ("linear error", "values error", "openblas error"):
        assert float(report[name]) < 1e-4, name
    assert int(report["row calls"]) >= 80


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is a Linux mechanism")
def test_openblas_mode_sends_one_row_through_sgemv(library):
    program = """
import ctypes
import mlx.core as mx
x = mx.random.normal((1, 200), key=mx.random.key(1))
w = mx.random.normal((130, 200), key=mx.random.key(2))
y = x[:, :130]
print(float(mx.abs(x @ w.T - (x * w).sum(1)).max()))
print(float(mx.abs(y @ w - (y.T * w).sum(0)).max()))
print(ctypes.c_ulong.in_dll(ctypes.CDLL(None), "spec_blas_row_calls").value)
"""
    *errors, calls = run_mlx(library, program, blas="openblas").splitlines()
    assert max(map(float, errors)) < 1e-4
    assert calls == "0"


def test_build_prints_the_path_and_a_preload_line(library):
    done = subprocess.run([TOOL / "build"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{library}\nexport LD_PRELOAD={library}\n"
    assert Path(library).is_file()


def test_build_refuses_without_a_compiler(tmp_path):
    for name in ("sh", "uname", "dirname", "grep"):
        (tmp_path / name).symlink_to(f"/bin/{name}" if name != "dirname" else "/usr/bin/dirname")
    command = ["env", f"PATH={tmp_path}", "/bin/sh", TOOL / "build", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("[cpu-blas] Needs ")
    assert not (tmp_path / "out").exists()


AT_ONCE = """
import ctypes, os, sys, threading
import numpy as np
library = ctypes.CDLL(sys.argv[1])
library.cblas_sgemm.restype = None
rng = np.random.default_rng(0)
x = rng.standard_normal((8, 640), np.float32)
w = rng.standard_normal((1024, 640), np.float32)  # enough to be shared between the processors

def product():
    out = np.zeros((8, 1024), np.float32)
    at = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, w, out)]
    one, none = ctypes.c_float(1.0), ctypes.c_float(0.0)
    library.cblas_sgemm(101, 111, 112, 8, 1024, 640, one, at[0], 640, at[1], 640, none, at[2], 1024)
    return out.tobytes()

first, found = product(), []
threads = [
    threading.Thread(target=lambda: found.extend(product() for _ in range(200))) for _ in range(4)
]
[t.start() for t in threads]
[t.join() for t in threads]
print("threads alike:", len(found) == 800 and set(found) == {first})
child = os.fork()
if child == 0:
    os._exit(0 if all(product() == first for _ in range(50)) else 1)
print("a forked child alike:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
print("the parent afterwards:", product() == first)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_calls_from_several_threads_and_from_a_fork_have_the_same_bits(library, threads):
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, library],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        check=True,
    )
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == ["True"] * 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, "2"),
        ({"cpu.max": "max 100000"}, "2"),
        ({"cpu.max": "100000 100000"}, "1"),
        ({"cpu.max": "20000 100000"}, "1"),
        ({"cpu.max": "100001 100000"}, "2"),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2"),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, "1"),
    ],
)
def test_a_quota_of_the_control_group_limits_the_threads(library, tmp_path, files, threads):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    program = tmp_path / "threads.c"
    program.write_text(
        '#include "pool.h"\n#include <stdio.h>\nint main(void) { printf("%d", pool_threads()); }'
    )
    out = tmp_path / "threads"
    gcc = ["gcc", "-mavx2", "-Wall", "-Werror", f'-DCGROUPS="{tmp_path}"', f"-I{TOOL}", "-o", out]
    subprocess.run([*gcc, program, TOOL / "pool.c", "-lpthread"], check=True)
    two = {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([out], env=two, capture_output=True, text=True, check=True)
    assert done.stdout == threads
