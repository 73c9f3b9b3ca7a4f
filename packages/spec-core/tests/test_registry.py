import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from spec_core import LoadError, SpecError, registry
from spec_core.registry import DRAFTERS, TARGETS


class Distribution:
    """As much of a distribution as an entry point shows."""

    def __init__(self, name: str) -> None:
        self.name = name


def entry(name: str, value: str, group: str = DRAFTERS, dist: str | None = None) -> EntryPoint:
    point = EntryPoint(name, value, group)
    if dist is not None:
        vars(point)["dist"] = Distribution(dist)
    return point


@pytest.fixture(name="install")
def _install(monkeypatch):
    """Makes the given entry points the installed ones."""

    def install(*points: EntryPoint) -> None:
        installed = EntryPoints(points)
        monkeypatch.setattr(registry, "entry_points", lambda group: installed.select(group=group))

    return install


def message(group: str, name: str) -> str:
    with pytest.raises(LoadError) as error:
        registry.load(group, name)
    return str(error.value)


def test_a_name_loads_what_its_entry_point_stands_for(install):
    install(entry("toy", "spec_core.toys:ToyDrafter"), entry("toy", "math:pi", TARGETS))
    from spec_core.toys import ToyDrafter

    assert registry.load(DRAFTERS, "toy") is ToyDrafter
    assert registry.load(TARGETS, "toy") == pytest.approx(3.14159, abs=1e-5)


def test_names_are_sorted_and_import_nothing(install):
    install(entry("lookup", "this:x"), entry("dspark", "antigravity:y"), entry("lookup", "this:x"))
    assert registry.names(DRAFTERS) == ["dspark", "lookup"]
    assert registry.names(TARGETS) == []
    assert "antigravity" not in sys.modules


def test_an_unknown_name_lists_the_installed_ones_and_the_nearest(install):
    install(*(entry(name, "math:pi") for name in ("lookup", "dspark", "dflash")))
    assert message(DRAFTERS, "dflsh") == (
        '[registry] No drafter "dflsh". Installed: "dflash", "dspark", "lookup". '
        'Did you mean "dflash"?'
    )


def test_an_unknown_name_like_no_other_gets_no_hint(install):
    install(entry("lookup", "math:pi"))
    assert message(DRAFTERS, "zzz") == '[registry] No drafter "zzz". Installed: "lookup".'


def test_an_unknown_name_when_nothing_is_installed(install):
    install()
    assert message(TARGETS, "qwen3") == '[registry] No target "qwen3". Installed: none.'


def test_a_name_that_two_distributions_claim_is_refused(install):
    install(
        entry("toy", "math:pi", dist="spec-b"),
        entry("toy", "math:e", dist="spec-a"),
        entry("toy", "math:tau"),
    )
    assert message(DRAFTERS, "toy") == (
        '[registry] "toy" must be claimed by one distribution, got math:tau, spec-a, spec-b. '
        "Uninstall all but one."
    )


def test_one_distribution_seen_twice_is_no_conflict(install):
    install(entry("toy", "math:pi", dist="spec-a"), entry("toy", "math:pi", dist="spec-a"))
    assert registry.load(DRAFTERS, "toy") == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("spec_core_no_such_module:X", "No module named 'spec_core_no_such_module'"),
        ("math:no_such_name", "module 'math' has no attribute 'no_such_name'"),
    ],
)
def test_a_plugin_that_does_not_import_is_named(install, value, reason):
    install(entry("toy", value, dist="spec-broken"))
    assert message(DRAFTERS, "toy") == (
        f'[registry] "toy" must be importable, got "{reason}" from spec-broken. '
        "Reinstall that distribution."
    )


def test_a_plugin_whose_module_raises_is_named(install, tmp_path, monkeypatch):
    (tmp_path / "spec_core_raises.py").write_text("raise RuntimeError('no device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(entry("toy", "spec_core_raises:X", dist="spec-broken"))
    assert message(DRAFTERS, "toy") == (
        '[registry] "toy" must be importable, got "no device" from spec-broken. '
        "Reinstall that distribution."
    )


def test_a_registry_error_can_be_caught_as_an_error_of_ours(install):
    install()
    with pytest.raises(SpecError):
        registry.load(DRAFTERS, "x")
