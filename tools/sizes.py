"""Lengths of files, functions and READMEs.

    uv run tools/sizes.py [FOLDER OF A WORKSPACE]

A file has at most 600 lines, a function at most 80, a package's README at most 80. Files above 400
are listed and pass: split them by concept when the next change touches them. An example is about a
page: at most 140 lines.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from workspace import ROOT, nodes, report

FILE, LONG_FILE, FUNCTION, README, EXAMPLE = 600, 400, 80, 80, 140
FOLDERS = ("packages", "tools", "tests-integration", "benchmarks", "examples")


def main() -> int:
    """Check a workspace; prints what is too long."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    problems: list[str] = []
    for path in _python_files(root):
        where = path.relative_to(root).as_posix()
        text = path.read_text()
        n_lines = len(text.splitlines())
        most = EXAMPLE if where.startswith("examples/") else FILE
        if n_lines > most:
            problems.append(f"{where} must have at most {most} lines, got {n_lines}. Split it.")
        elif n_lines > LONG_FILE and "/src/" in where:
            print(f"[sizes] note: {where} has {n_lines} lines, more than {LONG_FILE}.")
        problems += _functions(where, ast.parse(text, str(path)))
    for path in sorted(root.glob("packages/*/README.md")):
        n_lines = len(path.read_text().splitlines())
        if n_lines > README:
            where = path.relative_to(root).as_posix()
            problems.append(f"{where} must have at most {README} lines, got {n_lines}.")
    return report("sizes", problems)


def _python_files(root: Path) -> list[Path]:
    """Python files of the workspace, hidden folders left out."""
    every = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return sorted(p for p in every if not any(part[0] == "." for part in p.relative_to(root).parts))


def _functions(where: str, tree: ast.Module) -> Iterator[str]:
    for node, _ in nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if n_lines > FUNCTION:
            yield (
                f"{where}:{node.lineno} {node.name}() must have at most {FUNCTION} lines, "
                f"got {n_lines}. Split it."
            )


if __name__ == "__main__":
    sys.exit(main())
