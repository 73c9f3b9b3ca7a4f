"""Each check passes on a small workspace and fails on a violation planted in it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1]
ROOT = TOOLS.parent

PROJECT = """\
[project]
name = "{name}"
version = "{version}"
description = "A package of a test."
requires-python = ">=3.11"
dependencies = [{needs}]

[project.optional-dependencies]
hub = [{extras}]

[build-system]
requires = ["uv_build>=0.8,<0.14"]
build-backend = "uv_build"

[tool.uv.build-backend]
module-name = "{module}"
"""

Write = Callable[..., Path]


def quoted(requirements: list[str]) -> str:
    return ", ".join(f'"{line}"' for line in requirements)


@pytest.fixture(name="package")
def _package(tmp_path: Path) -> Write:
    """Writes one package into a workspace in tmp_path."""
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]\n')

    def package(name: str, source: str = "", file: str = "main.py", **fields) -> Path:
        module = fields.get("module", name.replace("-", "_"))
        folder = tmp_path / "packages" / name
        path = folder / "src" / module / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        (folder / "src" / module / "__init__.py").touch()
        needs, extras = quoted(fields.get("needs", [])), quoted(fields.get("extras", []))
        version = fields.get("version", "0.1.0")
        text = PROJECT.format(name=name, version=version, needs=needs, extras=extras, module=module)
        (folder / "pyproject.toml").write_text(text)
        changelog = f"# Changelog of {name}\n\n## Unreleased\n\n- First version.\n"
        (folder / "CHANGELOG.md").write_text(fields.get("changelog", changelog))
        (folder / "README.md").write_text(f"# {name}\n")
        return folder

    return package


def run(tool: str, *arguments: object) -> tuple[int, list[str]]:
    command = [sys.executable, str(TOOLS / tool), *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_this_workspace_passes():
    for tool in ("layers.py", "sizes.py", "changelogs.py"):
        status, lines = run(tool, ROOT)
        assert status == 0, lines
        assert all("] note: " in line for line in lines)


def test_layers_pass_on_declared_imports(package, tmp_path):
    package("spec-core", "import math\nimport mlx.core as mx\n", needs=["mlx>=0.32"])
    package(
        "spec-drafters",
        "import spec_core\nfrom spec_core.types import Draft\nfrom . import other\n"
        "from spec_drafters import other\ndef f():\n    import huggingface_hub\n    import json\n",
        needs=["spec-core>=0.1", "mlx"],
        extras=["huggingface-hub>=0.30"],
    )
    package("spec-core", "def f():\n    import mlx\n", "registry.py", needs=["mlx"])
    assert run("layers.py", tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("name", "source", "fields", "message"),
    [
        (
            "spec-drafters",
            "\nimport numpy.linalg",
            {},
            ':2 imports "numpy", which spec-drafters does not declare.',
        ),
        (
            "spec-drafters",
            "from numpy import array",
            {"needs": ["num-py"]},
            ':1 imports "numpy", which spec-drafters does not declare.',
        ),
        (
            "spec-core",
            "import numpy",
            {"needs": ["mlx"]},
            ':1 imports "numpy", which spec-core must not know.',
        ),
        (
            "spec-convert",
            "import mlx.core",
            {"needs": ["mlx"]},
            ':1 imports "mlx", which spec-convert must not know.',
        ),
        (
            "spec-drafters",
            "if True:\n    from mlx_lm import load",
            {"needs": ["mlx-lm"]},
            ":2 imports \"mlx_lm\", which is for ['spec-targets'] alone.",
        ),
        (
            "spec-drafters",
            "import huggingface_hub",
            {"extras": ["huggingface-hub"]},
            ':1 imports "huggingface_hub", an extra, at start-up. Move it into a function.',
        ),
        (
            "spec-drafters",
            "class A:\n    def f(self):\n        import mlx",
            {"needs": ["mlx"]},
            ':3 imports "mlx" inside a function. Move it to the top.',
        ),
        (
            "spec-drafters",
            "def f():\n    from spec_drafters import x",
            {},
            ':2 imports "spec_drafters" inside a function. Move it to the top.',
        ),
        (
            "spec-drafters",
            "import os\nX = os.environ.get('X')",
            {},
            ":2 reads the environment. Only spec_cli/env.py may.",
        ),
        (
            "spec-drafters",
            "import os\nX = os.getenv('X')",
            {},
            ":2 reads the environment. Only spec_cli/env.py may.",
        ),
    ],
)
def test_layers_fail_on_a_planted_import(package, tmp_path, name, source, fields, message):
    package(name, source, **fields)
    where = f"packages/{name}/src/{name.replace('-', '_')}/main.py"
    assert run("layers.py", tmp_path) == (1, [f"[layers] {where}{message}"])


def test_layers_let_the_command_line_read_the_environment_and_import_late(package, tmp_path):
    source = "import os\nX = os.environ\ndef f():\n    import mlx\n"
    package("spec-cli", source, "env.py", needs=["mlx"])
    assert run("layers.py", tmp_path) == (0, [])


def test_layers_fail_on_a_dependency_against_the_stream(package, tmp_path):
    package("spec-core", needs=["mlx", "numpy>=2"])
    package("spec-drafters", needs=["spec-core"])
    package("spec-targets", needs=["spec-core", "Spec_Drafters>=0.1"])
    assert run("layers.py", tmp_path) == (
        1,
        [
            "[layers] spec-core must need nothing but ['mlx'], got \"numpy>=2\".",
            "[layers] spec-targets must not depend on spec-drafters. Imports flow one way.",
        ],
    )


def test_layers_fail_on_an_example_that_needs_more_than_it_shows(package, tmp_path):
    package("spec-core", needs=["mlx"])
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "plain.py").write_text("import json\nimport mlx.core as mx\nimport spec_core\n")
    (folder / "other.py").write_text("import plain\nfrom mlx_lm.utils import load\n")
    assert run("layers.py", tmp_path) == (0, [])
    (folder / "other.py").write_text("import plain\nfrom spec_targets import load_target\n")
    (folder / "plain.py").write_text("def f():\n    import spec_core\n")
    allowed = "['mlx', 'mlx_lm', 'mlx_vlm', 'spec_core', 'spec_drafters']"
    assert run("layers.py", tmp_path) == (
        1,
        [
            f'[layers] examples/other.py:2 imports "spec_targets". Examples need only {allowed}.',
            '[layers] examples/plain.py:2 imports "spec_core" inside a function. '
            "Move it to the top.",
        ],
    )


def test_layers_fail_on_a_circle(package, tmp_path):
    package("spec-b", needs=["spec-c"])
    package("spec-c", needs=["spec-a>=0.1"])
    package("spec-a", needs=["spec-b"])
    status, lines = run("layers.py", tmp_path)
    assert status == 1
    assert (
        "[layers] Dependencies must have no circle, got spec-a -> spec-b -> spec-c -> spec-a."
        in lines
    )
    assert sum("circle" in line for line in lines) == 1


def test_a_package_without_its_import_folder_is_named(package, tmp_path):
    folder = package("spec-a")
    (folder / "src" / "spec_a" / "__init__.py").unlink()
    command = [sys.executable, str(TOOLS / "layers.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "[workspace] spec-a/src must hold one package, got [].\n"


def function(n_lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (n_lines - 1)


@pytest.mark.parametrize("n_lines", [1, 400, 401, 600])
def test_a_file_of_600_lines_passes_with_a_note_from_401_on(package, tmp_path, n_lines):
    package("spec-a", "x = 1\n" * n_lines)
    where = "packages/spec-a/src/spec_a/main.py"
    note = f"[sizes] note: {where} has {n_lines} lines, more than 400."
    assert run("sizes.py", tmp_path) == (0, [note] if n_lines > 400 else [])


def test_a_file_of_601_lines_fails(package, tmp_path):
    package("spec-a", "x = 1\n" * 601)
    assert run("sizes.py", tmp_path) == (
        1,
        [
            "[sizes] packages/spec-a/src/spec_a/main.py must have at most 600 lines, got 601. "
            "Split it."
        ],
    )


def test_a_function_of_80_lines_passes_and_one_of_81_fails(package, tmp_path):
    package("spec-a", function(80))
    assert run("sizes.py", tmp_path) == (0, [])
    package("spec-a", "class A:\n    async " + function(81).replace("\n", "\n    "))
    assert run("sizes.py", tmp_path) == (
        1,
        [
            "[sizes] packages/spec-a/src/spec_a/main.py:2 f() must have at most 80 lines, got 81. "
            "Split it."
        ],
    )


def test_a_test_file_is_measured_too_and_a_hidden_folder_is_not(package, tmp_path):
    folder = package("spec-a")
    for place in ("tests", ".venv"):
        (folder / place).mkdir()
        (folder / place / "test_a.py").write_text("x = 1\n" * 601)
    status, lines = run("sizes.py", tmp_path)
    assert (status, len(lines)) == (1, 1)
    assert "packages/spec-a/tests/test_a.py must have at most 600 lines" in lines[0]


def test_an_example_of_141_lines_fails(package, tmp_path):
    package("spec-a")
    (tmp_path / "examples").mkdir()
    path = tmp_path / "examples" / "long.py"
    path.write_text("x = 1\n" * 140)
    assert run("sizes.py", tmp_path) == (0, [])
    path.write_text("x = 1\n" * 141)
    expected = "[sizes] examples/long.py must have at most 140 lines, got 141. Split it."
    assert run("sizes.py", tmp_path) == (1, [expected])


def test_a_readme_of_81_lines_fails(package, tmp_path):
    (package("spec-a") / "README.md").write_text("x\n" * 81)
    assert run("sizes.py", tmp_path) == (
        1,
        ["[sizes] packages/spec-a/README.md must have at most 80 lines, got 81."],
    )


@pytest.mark.parametrize(
    "changelog",
    [
        "## Unreleased\n\n- New.\n",
        "## 0.2.1 - 2026-01-31\n\n- New.\n\n## 0.2.0 - 2026-01-30\n",
        "# Changelog\n\n## Unreleased\n\n## 0.2.1 - 2026-01-31\n\n## 0.0.9 - 2025-01-30\n",
    ],
)
def test_a_changelog_that_fits_the_version_passes(package, tmp_path, changelog):
    package("spec-a", version="0.2.1", changelog=changelog)
    assert run("changelogs.py", tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("# Changelog\n", " must have an entry. Start it with `## Unreleased`."),
        (
            "## 0.2.0 - 2026-01-30\n",
            ": the newest release must be 0.2.1 as in pyproject.toml, got 0.2.0.",
        ),
        (
            "## Unreleased\n\n## 0.3.0 - 2026-01-30\n",
            ": the newest release must be 0.2.1 as in pyproject.toml, got 0.3.0.",
        ),
        (
            "## [0.2.1]\n",
            ': a heading must be "0.1.0 - 2026-01-31", got "[0.2.1]".',
        ),
        (
            "## 0.2.1 - 2026-01-30\n## Unreleased\n",
            ': a heading must be "0.1.0 - 2026-01-31", got "Unreleased".',
        ),
        (
            "## 0.2.1 - 2026-01-30\n## 0.10.0 - 2026-01-29\n",
            ": releases must go from new to old, got 0.2.1, 0.10.0.",
        ),
    ],
)
def test_a_changelog_that_does_not_fit_fails(package, tmp_path, changelog, message):
    package("spec-a", version="0.2.1", changelog=changelog)
    expected = f"[changelogs] spec-a/CHANGELOG.md{message}"
    assert run("changelogs.py", tmp_path) == (1, [expected])


def test_a_missing_changelog_fails(package, tmp_path):
    (package("spec-a") / "CHANGELOG.md").unlink()
    expected = "[changelogs] spec-a/CHANGELOG.md must exist. Start it with `## Unreleased`."
    assert run("changelogs.py", tmp_path) == (1, [expected])
