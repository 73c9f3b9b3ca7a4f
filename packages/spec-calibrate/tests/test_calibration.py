import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spec_calibrate import Calibration, CapController, Key, Store, calibrate, load_or_measure
from spec_calibrate.curves import Curve
from spec_calibrate.samples import UNKNOWN_NOISE
from spec_calibrate.scenarios import KNEE
from spec_core import Pair, generate
from spec_core.toys import ToyDrafter, ToyTarget

KEY = Key(device="toy", system="os", mlx="0.32", model="toy")
FAST = {"budget_s": 0.05}


def _scaled(curve: Curve, factor: float) -> Curve:
    return replace(curve, seconds=tuple(factor * s for s in curve.seconds))


def _pair(max_draft: int = 4) -> Pair:
    return Pair(ToyTarget(), ToyDrafter(max_draft=max_draft))


def test_the_second_call_finds_what_the_first_one_measured(tmp_path: Path):
    store = Store(tmp_path)
    first = load_or_measure(_pair(), KEY, store=store, **FAST)
    second = load_or_measure(_pair(), KEY, store=store, **FAST)
    assert (first.cached, second.cached) == (False, True)
    assert second.curves == store.get(KEY).curves
    assert second.curves.verify_s(3, 0) == pytest.approx(first.curves.verify_s(3, 0), abs=1e-8)


def test_calibrate_measures_again(tmp_path: Path):
    store = Store(tmp_path)
    store.put(KEY, KNEE.curves(4))
    assert not calibrate(_pair(), KEY, store=store, **FAST).cached
    assert store.get(KEY).curves != KNEE.curves(4)


def test_a_damaged_file_is_remarked_on_once_and_healed(tmp_path: Path):
    store, remarks = Store(tmp_path), []
    store.path(KEY).write_text("{")
    assert not load_or_measure(_pair(), KEY, store=store, notify=remarks.append, **FAST).cached
    damage = [remark for remark in remarks if "is not used" in remark]
    assert len(damage) == 1 and "measured again" in damage[0]
    remarks.clear()
    assert load_or_measure(_pair(), KEY, store=store, notify=remarks.append, **FAST).cached
    assert not [remark for remark in remarks if "is not used" in remark]


def test_without_a_place_to_store_it_works_with_a_remark(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store, remarks = Store(tmp_path / "file"), []
    found = load_or_measure(_pair(), KEY, store=store, notify=remarks.append, **FAST)
    assert found.curves.max_draft == 4
    assert any("is not kept" in remark for remark in remarks)


def test_a_drafter_with_longer_drafts_is_measured_anew(tmp_path: Path):
    store = Store(tmp_path)
    load_or_measure(_pair(2), KEY, store=store, **FAST)
    assert load_or_measure(_pair(5), KEY, store=store, **FAST).curves.max_draft == 5


def test_a_noisy_measurement_is_flagged_and_remarked_on(tmp_path: Path, monkeypatch):
    noisy = replace(KNEE.curves(4), noise=0.4)
    monkeypatch.setattr("spec_calibrate.calibration.measure", lambda *args, **kwargs: noisy)
    remarks: list[str] = []
    found = calibrate(_pair(), KEY, store=Store(tmp_path), notify=remarks.append)
    assert found.noisy and found.to_json()["noisy"] is True
    (said,) = remarks
    assert "Repeated ones differ by 40%: run spec calibrate when the machine is quiet." in said
    for _ in range(2):  # kept, but never silently
        remarks.clear()
        again = load_or_measure(_pair(), KEY, store=Store(tmp_path), notify=remarks.append)
        assert again.cached and again.noisy
        assert f"The stored ones of {found.created[:10]} differ by 40%" in remarks[0]
    quiet = replace(noisy, noise=0.02)
    monkeypatch.setattr("spec_calibrate.calibration.measure", lambda *args, **kwargs: quiet)
    remarks.clear()
    calibrate(_pair(), KEY, store=Store(tmp_path), notify=remarks.append)  # one call measures anew
    assert not load_or_measure(_pair(), KEY, store=Store(tmp_path), notify=remarks.append).noisy
    assert remarks == []


def test_a_noisy_measurement_is_made_again_on_later_occasions(tmp_path: Path, monkeypatch):
    """Taken once while the machine was busy, it would park a good drafter for ever."""
    store, made = Store(tmp_path), []
    busy = replace(KNEE.curves(4), noise=UNKNOWN_NOISE)
    slower = replace(busy, verify=tuple((d, _scaled(c, 9.0)) for d, c in busy.verify))
    quiet = replace(busy, noise=0.02)

    def measure(*args, **kwargs):
        made.append(1)
        return {1: busy, 2: slower, 3: quiet}[len(made)]

    def age(seconds):
        value = json.loads(store.path(KEY).read_text())
        value["created"] = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
        store.path(KEY).write_text(json.dumps(value))

    monkeypatch.setattr("spec_calibrate.calibration.measure", measure)
    load_or_measure(_pair(), KEY, store=store)
    assert load_or_measure(_pair(), KEY, store=store).cached  # a moment later nothing has changed
    age(120)
    kept = load_or_measure(_pair(), KEY, store=store).curves  # the second was slower still
    assert kept.verify_s(3, 0) == pytest.approx(busy.verify_s(3, 0)) and len(made) == 2
    age(-(10**6))  # the clock was put back since
    assert load_or_measure(_pair(), KEY, store=store).curves.noise == 0.02
    age(10**6)
    again = load_or_measure(_pair(), KEY, store=store)
    assert again.cached and again.curves.noise == 0.02 and len(made) == 3


def test_a_machine_that_stays_noisy_is_left_alone_in_the_end(tmp_path: Path, monkeypatch):
    store, made = Store(tmp_path), []
    noisy = replace(KNEE.curves(4), noise=0.4)
    monkeypatch.setattr(
        "spec_calibrate.calibration.measure", lambda *args, **kwargs: made.append(1) or noisy
    )
    monkeypatch.setattr("spec_calibrate.calibration._OCCASION_S", 0.0)
    found = [load_or_measure(_pair(), KEY, store=store) for _ in range(8)]
    assert [f.cached for f in found] == [False] * 4 + [True] * 4 and len(made) == 4


def test_a_machine_too_slow_to_repeat_itself_is_not_called_noisy_by_a_number(tmp_path, monkeypatch):
    unknown = replace(KNEE.curves(4), noise=UNKNOWN_NOISE)
    monkeypatch.setattr("spec_calibrate.calibration.measure", lambda *args, **kwargs: unknown)
    remarks: list[str] = []
    found = calibrate(_pair(), KEY, store=Store(tmp_path), notify=remarks.append)
    assert found.noisy and found.guessed
    assert not replace(found, curves=replace(unknown, noise=0.4)).guessed
    (said,) = remarks
    assert "must be timed three times" in said and "%" not in said
    assert "It is measured again later; spec calibrate does so now." in said


def test_a_guess_that_is_measured_no_more_does_not_promise_it(tmp_path, monkeypatch):
    unknown = replace(KNEE.curves(4), noise=UNKNOWN_NOISE)
    monkeypatch.setattr("spec_calibrate.calibration.measure", lambda *args, **kwargs: unknown)
    monkeypatch.setattr("spec_calibrate.calibration._OCCASION_S", 0.0)
    store, said = Store(tmp_path), []
    for _ in range(5):
        load_or_measure(_pair(), KEY, store=store, notify=said.append)
    assert ["measured again later" in remark for remark in said] == [True] * 3 + [False] * 2
    assert said[-1].endswith("the cap is a guess. spec calibrate measures again.")


def test_the_json_has_the_promised_keys():
    curves = replace(KNEE.curves(8), acceptance=(0.8,))
    data = Calibration(curves, KEY, "2026-01-01T00:00:00+00:00", True).to_json()
    for name in (
        "key verify_ms verify_ms_by_depth draft_ms overhead_ms chosen_cap expected_speedup "
        "created cached"
    ).split():
        assert name in data
    assert data["verify_ms"]["1"] == pytest.approx(KNEE.verify_s(1) * 1e3)
    assert data["chosen_cap"] == 5 and data["knee"] == 6
    assert data["expected_speedup"] == pytest.approx(max(data["speedup_by_cap"]), abs=1e-4)
    assert data["cached"] is True and data["key"]["model"] == "toy"
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_a_calibrated_controller_runs_the_loop_losslessly(tmp_path: Path):
    pair = _pair()
    found = load_or_measure(pair, KEY, store=Store(tmp_path), **FAST)
    plain = [t for r in generate(Pair(ToyTarget()), [1, 2], max_tokens=60) for t in r.tokens]
    rounds = generate(pair, [1, 2], max_tokens=60, cap=CapController(found.curves))
    assert [t for r in rounds for t in r.tokens] == plain
