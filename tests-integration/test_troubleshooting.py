"""Each message that docs/troubleshooting.md quotes is in the source; `..` stands for a value."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
VALUE = "\0"


def quoted() -> list[str]:
    """The first cell of every row, where it is a code span."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def messages() -> str:
    """Every text of the source with its values cut out, a line each."""
    found: list[str] = []
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [_text(node).replace("\n", " ") for node in ast.walk(tree) if _text(node)]
    return "\n".join(found)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else VALUE for v in node.values]
        return "".join(str(part) for part in parts)
    return ""


def in_source(message: str) -> bool:
    """Whether some text of the source is this message, or begins with it."""
    parts = [re.escape(part) for part in message.split("..")]
    return re.search(f"^{VALUE.join(parts)}", messages(), re.MULTILINE) is not None


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_source(message):
    assert in_source(message)


def test_the_page_quotes_many_and_a_message_that_nobody_says_is_noticed():
    assert len(quoted()) > 50
    assert not in_source("[model] No folder must be given.")
    assert not in_source('[model] No folder "..". Give up.')
    assert not in_source("[model] No folder ..")  # the name is in quotes there
