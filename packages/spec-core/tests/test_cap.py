import pytest

from spec_core import FixedCap, Round
from spec_core.protocols import Cap


def test_a_fixed_cap_never_changes():
    cap: Cap = FixedCap(3)
    assert cap.next() == 3
    cap.observe(Round((1, 2), "", "verify", 3, 1, "toy", 0, 0.1, None))
    assert cap.next() == 3


def test_a_cap_of_zero_is_plain_decoding():
    assert FixedCap(0).next() == 0


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError) as error:
        FixedCap(-1)
    assert str(error.value) == "[cap] The cap must be >= 0, got -1."
