"""SECURITY.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing(text: str) -> list[str]:
    """Test ids in a text whose file or function does not exist."""
    ids = re.findall(r"`([\w./-]+\.py)::(test_\w+)`", text)
    assert len(ids) == text.count("::")  # nothing is written in another way
    return [
        f"{path}::{name}"
        for path, name in ids
        if not (ROOT / path).is_file()
        or not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]


def test_every_test_that_security_names_exists():
    text = (ROOT / "SECURITY.md").read_text()
    assert text.count("::") > 20 and missing(text) == []


def test_a_test_that_does_not_exist_is_found():
    known = "tools/tests/test_security.py"
    assert missing(f"`{known}::test_none`, `tools/none.py::test_a`") == [
        f"{known}::test_none",
        "tools/none.py::test_a",
    ]
