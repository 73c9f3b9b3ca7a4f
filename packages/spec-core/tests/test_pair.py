import pytest

from spec_core import LoadError, Pair, load_pair, registry
from spec_core.testing import ToyDrafter, ToyTarget


@pytest.fixture
def loaders(monkeypatch):
    """Loaders that note what they are asked for."""
    asked = []

    def load_target(model, **options):
        asked.append(("target", model, options))
        return ToyTarget(), "tokenizer"

    def load_drafter(path, target, **options):
        assert isinstance(target, ToyTarget)
        asked.append(("drafter", path, options))
        return ToyDrafter()

    found = {"target": load_target, "drafter": load_drafter}
    monkeypatch.setattr(registry, "load", lambda group, name: found[name])
    return asked


def test_a_pair_is_loaded_by_the_installed_loaders(loaders):
    pair = load_pair("folder", target_options={"dtype": 1}, drafter_options={"bits": 8})
    assert isinstance(pair, Pair) and isinstance(pair.drafter, ToyDrafter)
    assert pair.tokenizer == "tokenizer"
    assert loaders == [
        ("target", "folder", {"dtype": 1}),
        ("drafter", None, {"mode": "auto", "model": "folder", "bits": 8}),
    ]


def test_baseline_mode_loads_no_drafter(loaders):
    assert load_pair("folder", mode="baseline").drafter is None
    assert [call[0] for call in loaders] == ["target"]


def test_a_named_drafter_is_handed_on(loaders):
    load_pair("folder", drafter="head", mode="dspark")
    assert loaders[1] == ("drafter", "head", {"mode": "dspark", "model": "folder"})


def test_without_loaders_the_message_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(LoadError, match='No loader "target". Installed: none.'):
        load_pair("folder")


def test_a_pair_has_the_taps_of_its_drafter():
    assert Pair(ToyTarget(), ToyDrafter(taps=(1, 3))).taps == (1, 3)
    assert Pair(ToyTarget()).taps == ()
