"""Imports against what each package declares: one direction, no circle, nothing undeclared.

    uv run tools/layers.py [FOLDER OF A WORKSPACE]

Reads pyproject.toml and the syntax trees below src; imports nothing.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from workspace import ROOT, Package, distribution, import_name, nodes, packages, report

# Siblings a package may know. A package that is not listed may know spec-core alone, like a drafter
# or a target from elsewhere.
SIBLINGS = {
    "spec-core": set[str](),
    "spec-kernels": set[str](),
    "spec-convert": set[str](),
    "spec-demo": set[str](),
    "spec-targets": {"spec-core", "spec-kernels"},
    "spec-server": {
        *("spec-core", "spec-drafters", "spec-targets", "spec-calibrate"),
        *("spec-convert", "spec-demo"),
    },
    "mlx-spec-server": {
        *("spec-core", "spec-drafters", "spec-targets", "spec-calibrate"),
        *("spec-convert", "spec-demo"),
    },
    "mlx-spec-cli": {
        *("spec-core", "spec-kernels", "spec-convert", "spec-demo", "spec-drafters"),
        *("spec-targets", "spec-calibrate", "mlx-spec-server"),
    },
}
# Packages that others take alone: nothing outside the standard library but these.
ONLY = {"spec-core": {"mlx"}, "spec-kernels": {"mlx"}, "spec-demo": set[str]()}
# Who may know what.
SOLE = {"mlx_lm": {"spec-targets"}, "mlx_vlm": {"spec-targets"}}
NEVER = {"spec-convert": {"mlx"}}
# May import inside functions: plugins, and what a command needs, load when they are asked for.
LATE = ("spec_core/registry.py", "spec_cli/")
ENVIRONMENT = "spec_cli/env.py"
# The examples show what another runtime needs: these, the standard library and one another.
EXAMPLES = {"mlx", "mlx_lm", "mlx_vlm", "spec_core", "spec_drafters"}


def main() -> int:
    """Check a workspace; prints what is wrong."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    every = packages(root)
    problems = list(_circles(every))
    for package in every:
        problems += _declared(package, every)
        for path in package.sources():
            where = path.relative_to(root).as_posix()
            tree = ast.parse(path.read_text(), str(path))
            problems += _imports(package, every, where, tree)
            problems += _environment(where, tree)
    problems += _examples(root)
    return report("layers", problems)


def _declared(package: Package, every: list[Package]) -> Iterator[str]:
    """What pyproject.toml may ask for."""
    names = {sibling.name for sibling in every}
    allowed = SIBLINGS.get(package.name, {"spec-core"})
    for requirement in package.requirements:
        name = distribution(requirement)
        if name in names and name not in allowed:
            yield f"{package.name} must not depend on {name}. Imports flow one way."
        only = ONLY.get(package.name)
        if only is not None and name not in only:
            yield f'{package.name} must need nothing but {sorted(only)}, got "{requirement}".'


def _examples(root: Path) -> Iterator[str]:
    """Imports of examples beyond what they are there to show."""
    paths = sorted((root / "examples").glob("*.py"))
    known = EXAMPLES | sys.stdlib_module_names | {path.stem for path in paths}
    for path in paths:
        where = path.relative_to(root).as_posix()
        for line, name, late in _imported(ast.parse(path.read_text(), str(path))):
            if name not in known:
                yield f'{where}:{line} imports "{name}". Examples need only {sorted(EXAMPLES)}.'
            elif late:
                yield f'{where}:{line} imports "{name}" inside a function. Move it to the top.'


def _circles(every: list[Package]) -> Iterator[str]:
    """Declared dependencies between siblings that lead back to where they start."""
    names = {package.name for package in every}
    needs = {p.name: [distribution(r) for r in p.requirements] for p in every}

    def walk(name: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if name in path:
            yield (*path[path.index(name) :], name)
            return
        for other in needs[name]:
            if other in names:
                yield from walk(other, (*path, name))

    circles = {min(_turns(circle)) for name in sorted(names) for circle in walk(name, ())}
    for circle in sorted(circles):
        yield f"Dependencies must have no circle, got {' -> '.join((*circle, circle[0]))}."


def _turns(circle: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A closed circle from each of its members, without the repeated end."""
    ring = circle[:-1]
    return [ring[i:] + ring[:i] for i in range(len(ring))]


def _imports(package: Package, every: list[Package], where: str, tree: ast.Module) -> Iterator[str]:
    """Imports that are undeclared, forbidden, too early or too late."""
    declared = {import_name(r, every) for r in package.requirements}
    optional = {import_name(r, every) for r in package.extras} - declared
    for line, name, late in _imported(tree):
        here = f"{where}:{line}"
        if name == package.import_name or name in sys.stdlib_module_names:
            if late and name == package.import_name and not _may_be_late(where):
                yield f'{here} imports "{name}" inside a function. Move it to the top.'
            continue
        only = ONLY.get(package.name)
        if (only is not None and name not in only) or name in NEVER.get(package.name, ()):
            yield f'{here} imports "{name}", which {package.name} must not know.'
        elif name in SOLE and package.name not in SOLE[name]:
            yield f'{here} imports "{name}", which is for {sorted(SOLE[name])} alone.'
        elif name in optional:
            if not late:
                yield f'{here} imports "{name}", an extra, at start-up. Move it into a function.'
        elif name not in declared:
            yield f'{here} imports "{name}", which {package.name} does not declare.'
        elif late and not _may_be_late(where):
            yield f'{here} imports "{name}" inside a function. Move it to the top.'


def _may_be_late(where: str) -> bool:
    return any(part in where for part in LATE)


def _imported(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, top-level name, inside a function) of every absolute import."""
    for node, inside in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0], inside
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0], inside


def _environment(where: str, tree: ast.Module) -> Iterator[str]:
    """Reads of environment variables outside the one file for them."""
    if where.endswith(ENVIRONMENT):
        return
    for node, _ in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield f"{where}:{node.lineno} reads the environment. Only {ENVIRONMENT} may."


if __name__ == "__main__":
    sys.exit(main())
