import ast
from pathlib import Path

import mlx.core as mx

import spec_core
from spec_core.host import host_int, host_ints

READS = {"item", "tolist", "memoryview", "eval"}


def test_integers_come_over_as_python_integers():
    values = host_ints(mx.array([3, 1, 2], mx.int32))
    assert values == [3, 1, 2]
    assert all(type(value) is int for value in values)
    assert type(host_int(mx.array(7, mx.uint32))) is int
    assert host_int(mx.array(7, mx.uint32)) == 7


def test_no_other_module_reads_the_device():
    """`testing` may: it is not part of a generation."""
    for path in Path(spec_core.__file__).parent.glob("*.py"):
        if path.name in ("host.py", "testing.py"):
            continue
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        called = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        assert not called & READS, path.name


def test_every_read_says_why():
    for path in Path(spec_core.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if "host_ints(" in line or "host_int(" in line:
                assert "def host_int" in line or "# sync: " in line, f"{path.name}: {line}"
