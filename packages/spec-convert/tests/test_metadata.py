import numpy as np
import pytest

from spec_convert.errors import ConvertError
from spec_convert.metadata import Metadata

VALUES = Metadata(
    {
        "text": "llama",
        "whole": 7,
        "real": 0.5,
        "yes": True,
        "nan": float("nan"),
        "words": ["a"],
        "ids": np.array([1, 2], "<u4"),
        "scores": np.array([0.5], "<f4"),
        "empty": np.array([], "<i4"),
    }
)


def test_values_of_the_right_type_are_returned():
    assert VALUES.text("text") == "llama"
    assert VALUES.integer("whole") == 7
    assert VALUES.number("real") == 0.5
    assert VALUES.number("whole") == 7
    assert VALUES.flag("yes") is True
    assert VALUES.texts("words") == ["a"]
    assert VALUES.texts("empty") == []
    assert VALUES.integers("ids") == [1, 2]
    assert VALUES.numbers("scores") == [0.5]


def test_absent_keys_give_the_default():
    assert VALUES.text("absent", None) is None
    assert VALUES.integer("absent", 3) == 3
    assert VALUES.texts("absent") == []


def test_absent_keys_without_a_default_are_refused_by_name():
    with pytest.raises(ConvertError, match='"absent", which is missing'):
        VALUES.number("absent")


@pytest.mark.parametrize(
    ("call", "key", "kind"),
    [
        (VALUES.text, "whole", "a string, got int 7"),
        (VALUES.integer, "real", "a whole number, got float 0.5"),
        (VALUES.integer, "yes", "a whole number, got bool True"),
        (VALUES.number, "nan", "a finite number, got float nan"),
        (VALUES.flag, "whole", "a boolean"),
        (VALUES.texts, "ids", "an array of strings, got an array of 2 uint32 values"),
        (VALUES.integers, "scores", "an array of whole numbers"),
        (VALUES.numbers, "ids", "an array of floating-point numbers"),
        (VALUES.numbers, "words", "an array of .* numbers, got an array of 1 strings"),
        (VALUES.flags, "text", 'a.* booleans, got the string "llama"'),
    ],
)
def test_a_wrong_type_is_refused_by_key(call, key, kind):
    with pytest.raises(ConvertError, match=f'"{key}" must be {kind}'):
        call(key)
