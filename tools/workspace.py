"""The packages of the workspace as their pyproject.toml files describe them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Distributions whose import name is not their own name with underscores.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml"}


@dataclass(frozen=True, slots=True)
class Package:
    """One package of the workspace.

    Attributes:
        folder: packages/<name>.
        name: Distribution name.
        version: As written in pyproject.toml.
        requirements: Requirement strings of the package itself.
        extras: Requirement strings of all its extras.
        import_name: The one folder below src.
    """

    folder: Path
    name: str
    version: str
    requirements: tuple[str, ...]
    extras: tuple[str, ...]
    import_name: str

    def sources(self) -> list[Path]:
        """Python files below src, sorted."""
        return sorted((self.folder / "src").rglob("*.py"))


def packages(root: Path) -> list[Package]:
    """Every package of the workspace, sorted by folder.

    Raises:
        SystemExit: a package lacks its one import folder.
    """
    return [_package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def _package(folder: Path) -> Package:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    imports = [path.parent.name for path in (folder / "src").glob("*/__init__.py")]
    if len(imports) != 1:
        raise SystemExit(f"[workspace] {folder.name}/src must hold one package, got {imports}.")
    extras = project.get("optional-dependencies", {})
    return Package(
        folder=folder,
        name=project["name"],
        version=project["version"],
        requirements=tuple(project.get("dependencies", ())),
        extras=tuple(line for lines in extras.values() for line in lines),
        import_name=imports[0],
    )


def distribution(requirement: str) -> str:
    """Normalised distribution name of a requirement: `MLX_lm[x]>=1` -> `mlx-lm`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if name is None:
        raise SystemExit(f'[workspace] A requirement must start with a name, got "{requirement}".')
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def import_name(requirement: str, siblings: list[Package]) -> str:
    """What the distribution of a requirement is imported as."""
    name = distribution(requirement)
    own = {distribution(package.name): package.import_name for package in siblings}
    return own.get(name) or IMPORT_NAMES.get(name, name.replace("-", "_"))


def nodes(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `tree`, with True when it lies inside a function."""
    for child in ast.iter_child_nodes(tree):
        yield child, inside
        deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from nodes(child, inside=deeper)


def report(tool: str, problems: list[str]) -> int:
    """Print problems, one a line; returns the exit status."""
    for problem in problems:
        print(f"[{tool}] {problem}")
    return 1 if problems else 0
