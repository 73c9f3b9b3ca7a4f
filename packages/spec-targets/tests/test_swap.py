import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_targets.swap import Swaps, rebind


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = mx.array([5.0])

    def __call__(self, x, *, shift=0):
        return self.inner(x) + shift

    def inner(self, x):
        return double(x) * self.weight


def test_one_instance_is_swapped_and_put_back():
    layer, other, swaps = Layer(), Layer(), Swaps()
    swaps.swap(layer, {"__call__": lambda self, x: x})
    swaps.swap(layer, {"__call__": lambda self, x: -x})
    assert layer(7) == -7 and other(7).item() == 70
    assert isinstance(layer, Layer) and type(layer).__name__ == "Layer"
    assert list(layer.parameters()) == ["weight"]
    swaps.undo()
    assert type(layer) is Layer and layer(7).item() == 70


def test_a_method_is_made_to_call_another_function_and_the_class_is_not():
    layer, swaps = Layer(), Swaps()
    methods = rebind(Layer, "double", triple)
    assert list(methods) == ["inner"]
    swaps.swap(layer, methods)
    assert layer(7, shift=1).item() == 106
    assert Layer()(7).item() == 70


def test_a_name_that_no_method_calls_is_an_error():
    with pytest.raises(LookupError, match='No method of Layer calls "quadruple"'):
        rebind(Layer, "quadruple", triple)
