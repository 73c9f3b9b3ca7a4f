"""Every "yes" in the README's tables names a test that exists; every named test backs a "yes".

And every figure in its table of measurements stands on the page that the row links to.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/features.md", "docs/features-around.md")
ID = re.compile(r"`([\w./-]+\.py)::(\w+)(?:\[([^\]`]+)\])?`")
ANSWERS = ("yes", "-")


def rows(text: str) -> list[list[str]]:
    """The cells of each table row."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def claims(text: str) -> dict[tuple[str, str], str]:
    """(row, column) -> answer, over the tables of "What works"."""
    section = text.split("## What works", 1)[1].split("\n## ", 1)[0]
    found: dict[tuple[str, str], str] = {}
    header: list[str] = []
    for line in section.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        (cells,) = rows(line)
        if not header:
            header = cells
        elif set(line) - set("|- :"):
            for column, answer in zip(header[1:], cells[1:], strict=True):
                found[cells[0], column] = answer
    return found


def proofs(text: str) -> dict[tuple[str, str], list[tuple[str, str, str]]]:
    """(row, column) -> tests as (file, name, parameter), over the sections of a page."""
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0].strip()
        for cell, tests in rows(section.split("\n## ")[0])[2:]:
            found[title, cell] = ID.findall(tests)
    return found


@cache
def named_in(path: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the tests in a file, and every text that it holds; nothing is imported."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return frozenset(names), frozenset(s for s in strings if isinstance(s, str))


README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS = claims(README)
PROOFS = {k: v for page in PAGES for k, v in proofs((ROOT / page).read_text("utf-8")).items()}


def figures() -> list[tuple[str, str, str]]:
    """(figure, page, row) of the README's measurements; "the same": the page of the row before."""
    found: list[tuple[str, str, str]] = []
    page = ""
    for what, result, where in rows(README.split("## Measured", 1)[1].split("\n## ", 1)[0])[2:]:
        linked = re.findall(r"\]\((docs/benchmarks/[^)]+)\)", where)
        assert linked or where.startswith("the same"), f"{what} names no page"
        page = linked[0] if linked else page
        found += [(figure, page, what) for figure in re.findall(r"\d+(?:\.\d+)?", result)]
    return found


@pytest.mark.parametrize(("figure", "page", "what"), figures())
def test_a_measured_figure_stands_on_its_page(figure, page, what):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text), what


def test_the_tables_are_read():
    assert len(CLAIMS) > 40 and sum(a == "yes" for a in CLAIMS.values()) > 40
    assert set(CLAIMS.values()) <= {*ANSWERS}


@pytest.mark.parametrize("claim", [k for k, v in CLAIMS.items() if v == "yes"], ids=" / ".join)
def test_a_yes_names_tests_that_exist(claim):
    assert PROOFS.get(claim), f"{claim} has no test"


def test_nothing_else_is_proved():
    """A proof without a claim is a row that somebody forgot in one of the two places."""
    assert set(PROOFS) == {k for k, v in CLAIMS.items() if v == "yes"}


@pytest.mark.parametrize("claim", PROOFS, ids=" / ".join)
def test_named_tests_exist(claim):
    for path, name, parameter in PROOFS[claim]:
        assert (ROOT / path).is_file(), path
        names, strings = named_in(path)
        assert name in names and name.startswith("test_"), f"{path} has no {name}"
        assert not parameter or parameter in strings, f"{path} has no parameter {parameter}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("| drafts | `p/a/test_b.py::test_c` |", [("p/a/test_b.py", "test_c", "")]),
        ("| drafts | `t/test_b.py::test_c[x, y]` and more |", [("t/test_b.py", "test_c", "x, y")]),
        ("| drafts | trust me |", []),
    ],
)  # fmt: skip
def test_a_line_without_a_test_id_proves_nothing(line, found):
    page = f"### row\n\n| cell | tests |\n| --- | --- |\n{line}\n"
    assert proofs(page) == {("row", "drafts"): found}
