"""Every package has a changelog whose top released entry is the version in pyproject.toml.

    uv run tools/changelogs.py [FOLDER OF A WORKSPACE]

A heading is `## Unreleased` (on top) or `## 0.3.1 - 2026-11-29`. A package that was never released
has an Unreleased section alone.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from workspace import ROOT, Package, packages, report

UNRELEASED = "Unreleased"
RELEASED = re.compile(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d{2}-\d{2}")


def main() -> int:
    """Check a workspace; prints what is wrong."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    return report("changelogs", [line for package in packages(root) for line in _check(package)])


def headings(changelog: str) -> list[str]:
    """Second-level headings, newest first."""
    return re.findall(r"^## (.*?)\s*$", changelog, re.MULTILINE)


def _check(package: Package) -> Iterator[str]:
    path = package.folder / "CHANGELOG.md"
    where = f"{package.folder.name}/CHANGELOG.md"
    if not path.is_file():
        yield f"{where} must exist. Start it with `## {UNRELEASED}`."
        return
    entries = headings(path.read_text())
    released = entries[1:] if entries[:1] == [UNRELEASED] else entries
    for entry in released:
        if not RELEASED.fullmatch(entry):
            yield f'{where}: a heading must be "0.1.0 - 2026-01-31", got "{entry}".'
            return
    versions = [entry.split(" ")[0] for entry in released]
    if not entries:
        yield f"{where} must have an entry. Start it with `## {UNRELEASED}`."
    elif versions and versions[0] != package.version:
        yield (
            f"{where}: the newest release must be {package.version} as in pyproject.toml, "
            f"got {versions[0]}."
        )
    numbers = [tuple(int(n) for n in version.split(".")) for version in versions]
    if numbers != sorted(set(numbers), reverse=True):
        yield f"{where}: releases must go from new to old, got {', '.join(versions)}."


if __name__ == "__main__":
    sys.exit(main())
