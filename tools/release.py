"""Release one package: bump, date the changelog, relock, build, commit, tag.

    uv run tools/release.py spec-core minor --dry-run
    uv run tools/release.py spec-core current        # a first release: the version as it is written

Order of releases: kernels, core; drafters, targets, calibrate, convert; cli, server. Pushes and
uploads nothing: that is left to whoever runs it.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from changelogs import UNRELEASED, headings
from packaging.requirements import Requirement
from workspace import ROOT, Package, distribution, packages

STEPS = ("major", "minor", "patch", "current")


@dataclass(frozen=True, slots=True)
class Release:
    """What is to be released, as which version."""

    root: Path
    package: Package
    version: str

    @property
    def title(self) -> str:
        """Of the commit."""
        return f"release {self.package.name} v{self.version}"

    @property
    def tag(self) -> str:
        """Of the tag."""
        return f"{self.package.name}-v{self.version}"

    @property
    def edited(self) -> tuple[Path, ...]:
        """Files that a release changes."""
        folder = self.package.folder
        return folder / "pyproject.toml", folder / "CHANGELOG.md", self.root / "uv.lock"


def main(arguments: list[str] | None = None) -> int:
    """Release, or say why not."""
    parser = argparse.ArgumentParser(description="Release one package of the workspace.")
    parser.add_argument("package", help="folder below packages/, or distribution name")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--dry-run", action="store_true", help="show the steps, change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="another workspace")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    every = packages(root)
    found = [p for p in every if options.package in (p.folder.name, p.name)]
    if not found:
        names = ", ".join(f'"{p.folder.name}"' for p in every)
        print(f'[release] No package "{options.package}". There are: {names}.')
        return 1
    release = Release(root, found[0], bumped(found[0].version, options.step))
    problems = list(_problems(release, every))
    for problem in problems:
        print(f"[release] {problem}")
    if problems:
        return 1
    if options.dry_run:
        print(f"{release.package.name} {release.package.version} -> {release.version}")
        print("\n".join("$ " + " ".join(command) for command in _commands(release)))
        return 0
    return _release(release)


def bumped(version: str, step: str) -> str:
    """The version after a step: a minor one makes 0.4.0 of 0.3.1."""
    numbers = [int(n) for n in version.split(".")]
    if step == "current":
        return version
    at = STEPS.index(step)
    return ".".join(str(n) for n in [*numbers[:at], numbers[at] + 1, *[0] * (2 - at)])


def _problems(release: Release, every: list[Package]) -> Iterator[str]:
    """Reasons not to release."""
    changelog = release.package.folder / "CHANGELOG.md"
    entries = re.split(r"^## ", changelog.read_text(), flags=re.MULTILINE)[1:]
    notes = entries[0].removeprefix(UNRELEASED).strip() if entries else ""
    if headings(changelog.read_text())[:1] != [UNRELEASED] or not notes:
        yield f"{changelog.parent.name}/CHANGELOG.md must say what is new under `## {UNRELEASED}`."
    if _git(release.root, "status", "--porcelain"):
        yield "The working tree must be clean. Commit or stash first."
    if _git(release.root, "tag", "--list", release.tag):
        yield f'The tag "{release.tag}" exists. Choose another step.'
    for other in every:
        for line in (*other.requirements, *other.extras):
            wanted = Requirement(line)
            if distribution(wanted.name) != distribution(release.package.name):
                continue
            if not wanted.specifier.contains(release.version):
                yield (
                    f'{other.name} asks for "{line}", which leaves out {release.version}. '
                    "Change its range, and its patch version, first."
                )


def _commands(release: Release) -> list[list[str]]:
    """Everything that is run, in order; the edits of two files come before."""
    files = [path.relative_to(release.root).as_posix() for path in release.edited]
    return [
        ["uv", "lock"],
        ["uv", "build", "--package", release.package.name, "--no-sources"],
        ["git", "add", "--", *files],
        ["git", "commit", "-m", release.title],
        ["git", "tag", release.tag],
    ]


def _release(release: Release) -> int:
    """Edit and run; when a step before the commit does not succeed, the files are put back."""
    before = {path: path.read_bytes() for path in release.edited}
    project, changelog, _ = release.edited
    today = datetime.date.today().isoformat()
    _replace(project, f'version = "{release.package.version}"', f'version = "{release.version}"')
    _replace(changelog, f"## {UNRELEASED}", f"## {release.version} - {today}")
    # A wheel for any platform; .github/workflows/release.yml makes those with the compiled loop.
    pure = os.environ | {"SPEC_CONVERT_LOOP": "none"}
    for command in _commands(release):
        print("$ " + " ".join(command), flush=True)
        if subprocess.run(command, cwd=release.root, env=pure, check=False).returncode == 0:
            continue
        if command[:2] != ["git", "tag"]:
            for path, content in before.items():
                path.write_bytes(content)
            _git(release.root, "reset", "--quiet")
        print("[release] The step above must succeed. What was not committed is as it was.")
        return 1
    print(f"Done. Next: git push --follow-tags; upload dist/{release.package.import_name}-*.")
    return 0


def _replace(path: Path, line: str, new: str) -> None:
    """Put another line in place of the first one that equals `line`."""
    lines = path.read_text().splitlines()
    lines[lines.index(line)] = new
    path.write_text("\n".join(lines) + "\n")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
