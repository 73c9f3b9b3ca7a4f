import ast
import math
from pathlib import Path

import mlx.core as mx

import spec_core
from spec_core.host import floats_as_ints, host_int, host_ints, ints_as_floats

READS = {"item", "tolist", "memoryview", "eval"}


def test_integers_come_over_as_python_integers():
    values = host_ints(mx.array([3, 1, 2], mx.int32))
    assert values == [3, 1, 2]
    assert all(type(value) is int for value in values)
    assert type(host_int(mx.array(7, mx.uint32))) is int
    assert host_int(mx.array(7, mx.uint32)) == 7


def test_no_other_module_reads_the_device():
    """The checks and toys may: they are no part of a generation."""
    for path in Path(spec_core.__file__).parent.glob("*.py"):
        if path.name in ("host.py", "testing.py", "fork_checks.py", "toys.py"):
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


def test_floats_keep_their_bits_through_a_read_of_integers():
    values = [0.0, 1.0, -2.5, 0.1, 3e-39, math.inf]
    expected = tuple(mx.array(values).tolist())
    assert ints_as_floats(floats_as_ints(mx.array(values)).tolist()) == expected


def test_half_precision_travels_as_float32():
    assert ints_as_floats(floats_as_ints(mx.array([0.25], mx.float16)).tolist()) == (0.25,)


def test_nothing_stays_nothing():
    assert ints_as_floats([]) == ()
