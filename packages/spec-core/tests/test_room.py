"""What does not fit into memory is refused with the bytes it needs."""

import os

import mlx.core as mx
import pytest

from spec_core import LoadError, room


def test_what_fits_is_let_through_and_what_does_not_is_refused_with_its_bytes(monkeypatch):
    monkeypatch.setattr(mx, "get_active_memory", lambda: 5000)
    monkeypatch.setattr(room, "machine_bytes", lambda: 6000)
    room.refuse_without_room("here", "A model", 1000)
    with pytest.raises(LoadError, match=r"^\[here\] A model needs 1001 bytes .* got 1000 \("):
        room.refuse_without_room("here", "A model", 1001)


def test_arrays_that_are_held_already_count(monkeypatch):
    array = mx.zeros(1000, mx.float32)
    mx.eval(array)
    monkeypatch.setattr(room, "machine_bytes", lambda: array.nbytes)
    with pytest.raises(LoadError, match=r"needs 1 bytes .* got 0 \("):
        room.refuse_without_room("here", "A model", 1)


def test_the_device_says_what_it_has_or_the_machine_does(monkeypatch):
    assert room.machine_bytes() > 2**28
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 12345})
    assert room.machine_bytes() == 12345
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    assert room.machine_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
