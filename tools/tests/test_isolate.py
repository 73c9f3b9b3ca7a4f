"""`tools/isolate` on a copy of this repository: an undeclared dependency breaks the tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "dist", ".*_cache", "__pycache__", "benchmarks")


@pytest.fixture(name="copy")
def _copy(tmp_path: Path) -> Path:
    folder = tmp_path / "spec"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def isolate(root: Path, *packages: str) -> tuple[int, str]:
    command = [str(root / "tools" / "isolate"), *packages]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_isolate_passes_on_declared_dependencies_and_fails_on_a_planted_one(copy):
    status, output = isolate(copy, "spec-demo")
    assert status == 0, output
    assert "== spec-demo" in output and "passed" in output
    path = copy / "packages" / "spec-demo" / "src" / "spec_demo" / "__init__.py"
    path.write_text(path.read_text() + "\nimport spec_core  # noqa\n")
    status, output = isolate(copy, "spec-demo")
    assert status != 0
    assert "ModuleNotFoundError: No module named 'spec_core'" in output


@pytest.mark.slow
def test_isolate_stops_at_the_first_package_that_breaks(copy):
    path = copy / "packages" / "spec-demo" / "tests" / "test_planted.py"
    path.write_text("def test_planted():\n    import fastapi\n")
    status, output = isolate(copy, "spec-demo", "spec-core")
    assert status != 0 and "No module named 'fastapi'" in output
    assert "== spec-core" not in output


def test_a_package_whose_environment_is_the_whole_one_is_left_to_tools_test():
    status, output = isolate(ROOT, "spec-cli")
    assert (status, output) == (
        0,
        "== mlx-spec-cli: needs every package, so tools/test is its test\n",
    )
