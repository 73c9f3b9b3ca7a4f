"""Releases in a workspace of two packages and a git repository of their own."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "release.py"
TODAY = datetime.date.today().isoformat()

PROJECT = """\
[project]
name = "{name}"
version = "0.3.1"
description = "A package of a test."
requires-python = ">=3.11"
dependencies = [{needs}]

[build-system]
requires = ["uv_build>=0.8,<0.14"]
build-backend = "uv_build"
"""


def shell(root: Path, *command: str) -> str:
    return subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A committed workspace: toy-core, and toy-user that needs it."""
    sources = "[tool.uv.sources]\ntoy-core = { workspace = true }\n"
    members = '[tool.uv.workspace]\nmembers = ["packages/*"]\n\n'
    (tmp_path / "pyproject.toml").write_text(members + sources)
    (tmp_path / ".gitignore").write_text("dist/\n")
    for name, needs in (("toy-core", ""), ("toy-user", '"toy-core>=0.3,<0.4"')):
        folder = tmp_path / "packages" / name
        module = folder / "src" / name.replace("-", "_")
        module.mkdir(parents=True)
        (module / "__init__.py").write_text('"""A package of a test."""\n')
        (folder / "pyproject.toml").write_text(PROJECT.format(name=name, needs=needs))
        (folder / "CHANGELOG.md").write_text(
            f"# Changelog of {name}\n\n## Unreleased\n\n- Something new.\n"
        )
    shell(tmp_path, "uv", "lock", "--quiet")
    shell(tmp_path, "git", "init", "--quiet")
    shell(tmp_path, "git", "config", "user.name", "Tester")
    shell(tmp_path, "git", "config", "user.email", "tester@example.org")
    shell(tmp_path, "git", "add", "--all")
    shell(tmp_path, "git", "commit", "--quiet", "--message", "start")
    return tmp_path


def release(root: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_dry_run_shows_the_steps_and_changes_nothing(root):
    status, output = release(root, "toy-core", "patch", "--dry-run")
    assert status == 0
    assert output.splitlines() == [
        "toy-core 0.3.1 -> 0.3.2",
        "$ uv lock",
        "$ uv build --package toy-core --no-sources",
        "$ git add -- packages/toy-core/pyproject.toml packages/toy-core/CHANGELOG.md uv.lock",
        "$ git commit -m release toy-core v0.3.2",
        "$ git tag toy-core-v0.3.2",
    ]
    assert shell(root, "git", "status", "--porcelain") == ""
    assert shell(root, "git", "log", "--format=%s") == "start"


@pytest.mark.slow
def test_a_release_bumps_dates_locks_builds_commits_and_tags(root):
    status, output = release(root, "toy-core", "patch")
    assert status == 0, output
    folder = root / "packages" / "toy-core"
    assert 'version = "0.3.2"' in (folder / "pyproject.toml").read_text()
    changelog = (folder / "CHANGELOG.md").read_text()
    assert changelog == f"# Changelog of toy-core\n\n## 0.3.2 - {TODAY}\n\n- Something new.\n"
    assert 'name = "toy-core"\nversion = "0.3.2"' in (root / "uv.lock").read_text()
    assert {path.name for path in (root / "dist").iterdir()} >= {
        "toy_core-0.3.2-py3-none-any.whl",
        "toy_core-0.3.2.tar.gz",
    }
    assert shell(root, "git", "log", "-1", "--format=%s") == "release toy-core v0.3.2"
    assert shell(root, "git", "tag", "--points-at", "HEAD") == "toy-core-v0.3.2"
    assert shell(root, "git", "status", "--porcelain") == ""
    changed = shell(root, "git", "show", "--name-only", "--format=").split()
    assert changed == [
        "packages/toy-core/CHANGELOG.md",
        "packages/toy-core/pyproject.toml",
        "uv.lock",
    ]


@pytest.mark.slow
def test_a_build_that_breaks_puts_the_files_back(root):
    folder = root / "packages" / "toy-core"
    (folder / "pyproject.toml").write_text(
        (folder / "pyproject.toml").read_text().replace("uv_build>=0.8,<0.14", "uv_build>=99")
    )
    shell(root, "git", "commit", "--quiet", "--all", "--message", "break")
    status, output = release(root, "toy-core", "current")
    assert status == 1
    assert "[release] The step above must succeed. What was not committed is as it was." in output
    assert shell(root, "git", "status", "--porcelain") == ""
    assert shell(root, "git", "tag") == ""


@pytest.mark.parametrize(
    ("step", "version"),
    [("current", "0.3.1"), ("patch", "0.3.2"), ("minor", "0.4.0"), ("major", "1.0.0")],
)
def test_a_step_raises_its_number_and_clears_those_behind_it(root, step, version):
    status, output = release(root, "toy-user", step, "--dry-run")
    assert (status, output.splitlines()[0]) == (0, f"toy-user 0.3.1 -> {version}")


def test_a_version_that_a_dependent_leaves_out_is_refused(root):
    assert release(root, "toy-core", "minor", "--dry-run") == (
        1,
        '[release] toy-user asks for "toy-core>=0.3,<0.4", which leaves out 0.4.0. '
        "Change its range, and its patch version, first.\n",
    )


def test_a_package_with_nothing_new_is_refused(root):
    path = root / "packages" / "toy-core" / "CHANGELOG.md"
    for text in ("## Unreleased\n\n", "## 0.3.1 - 2026-01-31\n\n- Old.\n", ""):
        path.write_text(text)
        shell(root, "git", "commit", "--quiet", "--all", "--message", "clear")
        assert release(root, "toy-core", "patch") == (
            1,
            "[release] toy-core/CHANGELOG.md must say what is new under `## Unreleased`.\n",
        )


def test_uncommitted_work_and_a_taken_tag_are_refused(root):
    shell(root, "git", "tag", "toy-core-v0.3.2")
    (root / "note.txt").write_text("x")
    assert release(root, "toy-core", "patch") == (
        1,
        "[release] The working tree must be clean. Commit or stash first.\n"
        '[release] The tag "toy-core-v0.3.2" exists. Choose another step.\n',
    )


def test_an_unknown_package_is_refused_with_the_known_ones(root):
    assert release(root, "toy-cor", "patch") == (
        1,
        '[release] No package "toy-cor". There are: "toy-core", "toy-user".\n',
    )


# -- this repository, in a clone of it -------------------------------------------------------------


@pytest.fixture(name="clone", scope="module")
def _clone(tmp_path_factory) -> Path:
    """A temporary clone of the last commit; releases in it leave the original alone."""
    original = TOOL.parents[1]
    if not (original / ".git").exists():
        pytest.skip("this is no git repository")
    folder = tmp_path_factory.mktemp("clone") / "spec"
    shell(original, "git", "clone", "--quiet", "--no-tags", str(original), str(folder))
    shell(folder, "git", "config", "user.name", "Tester")
    shell(folder, "git", "config", "user.email", "tester@example.org")
    return folder


def test_every_package_of_this_repository_can_be_released(clone):
    head = shell(clone, "git", "rev-parse", "HEAD")
    names = sorted(path.name for path in (clone / "packages").iterdir())
    assert len(names) == 9
    for name in names:
        status, output = release(clone, name, "current", "--dry-run")
        assert status == 0, output
        first, *steps = output.splitlines()
        distribution, version, _, same = first.split()
        assert version == same and distribution.endswith(name)
        assert steps[-1] == f"$ git tag {distribution}-v{version}"
    assert shell(clone, "git", "rev-parse", "HEAD") == head
    assert shell(clone, "git", "status", "--porcelain") == "" == shell(clone, "git", "tag")


def test_a_breaking_core_names_every_package_that_must_move_with_it(clone):
    status, output = release(clone, "spec-core", "minor", "--dry-run")
    named = {line.split()[1] for line in output.splitlines()}
    users = {"spec-drafters", "spec-targets", "spec-calibrate", "mlx-spec-server", "mlx-spec-cli"}
    assert status == 1 and named == users


def test_what_a_tag_names_is_built(clone):
    shell(clone, str(clone / "tools" / "build"), "spec-demo-v0.1.0")
    names = {"spec_demo-0.1.0-py3-none-any.whl", "spec_demo-0.1.0.tar.gz"}
    assert {path.name for path in (clone / "dist").iterdir()} >= names


@pytest.mark.slow
def test_a_first_release_of_kernels_is_whole_and_passes_the_checks(clone):
    status, output = release(clone, "spec-kernels", "current")
    assert status == 0, output
    assert shell(clone, "git", "tag") == "spec-kernels-v0.1.0"
    assert shell(clone, "git", "log", "-1", "--format=%s") == "release spec-kernels v0.1.0"
    assert (clone / "dist" / "spec_kernels-0.1.0-py3-none-any.whl").is_file()
    assert shell(clone, "git", "status", "--porcelain") == ""
    check = [sys.executable, str(TOOL.with_name("changelogs.py")), str(clone)]
    assert shell(clone, *check) == ""
    assert f"## 0.1.0 - {TODAY}" in (clone / "packages/spec-kernels/CHANGELOG.md").read_text()
    assert release(clone, "spec-kernels", "patch")[1] == (
        "[release] spec-kernels/CHANGELOG.md must say what is new under `## Unreleased`.\n"
    )
