import mlx.core as mx
import pytest

from spec_targets.taps import Taps
from spec_targets.tiny import tiny_model

IDS = mx.array([[3, 14, 15, 9]])


def test_taps_are_the_outputs_of_the_layers_and_change_nothing():
    model = tiny_model("llama")
    want = model(IDS)
    taps = Taps(model.model.layers)
    with taps.record((0, 2)) as seen:
        assert mx.array_equal(model(IDS), want)
        assert mx.array_equal(model.model.norm(seen[2]), model.model(IDS))
    assert mx.array_equal(model(IDS), want)


def test_nothing_is_kept_after_the_block_and_only_asked_layers_during_it():
    model = tiny_model("llama")
    taps = Taps(model.model.layers)
    with taps.record((1,)) as seen:
        model(IDS)
        assert list(seen) == [1]
    with taps.record(()) as seen:
        model(IDS)
        assert seen == {}


def test_undo_gives_the_classes_back():
    model = tiny_model("llama")
    before = [type(layer) for layer in model.layers]
    taps = Taps(model.model.layers)
    with taps.record((0, 1, 2)):
        model(IDS)
    assert [type(layer) for layer in model.layers] != before
    taps.undo()
    assert [type(layer) for layer in model.layers] == before


def test_a_layer_outside_the_model_is_refused():
    taps = Taps(tiny_model("llama").model.layers, n_loops=2)
    assert taps.n_layers == 6
    with pytest.raises(ValueError, match=r"Layer ids must be in 0\.\.5, got 6"), taps.record((6,)):
        pass
