import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spec_calibrate import Curve, Curves, Key, Store
from spec_calibrate.store import SCHEMA, default_folder

KEY = Key(device="toy", system="os 1", mlx="0.32", packages={"spec-core": "0.1.0"}, model="abc")
CURVES = Curves(
    verify=(
        (64, Curve((1, 2, 5), (0.01, 0.011, 0.02))),
        (2048, Curve((1, 2, 5), (0.02, 0.022, 0.04))),
    ),
    plain=Curve((64, 2048), (0.009, 0.018)),
    draft={"dspark": Curve((1, 4), (0.002, 0.003)), "lookup": Curve((1,), (1e-5,))},
    overhead_s=0.0004,
    acceptance=(0.7, 0.65),
    noise=0.02,
    max_draft=4,
    temperatures=(1.5, 2.0),
    blocks={"dspark": 3},
)


def _damaged(path: Path, content: bytes | dict) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)


def _content(store: Store) -> dict:
    return json.loads(store.path(KEY).read_text())


def test_what_was_put_comes_back(tmp_path: Path):
    store = Store(tmp_path / "new" / "folder")
    assert store.put(KEY, CURVES) == ""
    stored = store.get(KEY)
    assert stored.curves == CURVES and stored.reason == ""
    assert stored.created.startswith("20") and stored.created.endswith("+00:00")


def test_nothing_stored_is_a_miss_without_a_reason(tmp_path: Path):
    stored = Store(tmp_path).get(KEY)
    assert stored.curves is None and stored.reason == ""


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"},
        {"system": "os 2"},
        {"mlx": "0.33"},
        {"packages": {"spec-core": "0.2.0"}},
        {"kernels": "off"},
        {"model": "abd"},
        {"quantisation": "4 bits"},
        {"kv_bits": 8},
        {"drafter": "dspark"},
        {"batch": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_other_set_up_is_a_miss(tmp_path: Path, change):
    store = Store(tmp_path)
    store.put(KEY, CURVES)
    other = store.get(replace(KEY, **change))
    assert other.curves is None and other.reason == ""
    assert store.get(KEY).curves == CURVES


def test_the_order_of_packages_is_no_difference():
    a = replace(KEY, packages={"a": "1", "b": "2"})
    b = replace(KEY, packages={"b": "2", "a": "1"})
    assert a.digest == b.digest


DAMAGE = {
    "empty": b"",
    "cut": b'{"schema": 1, "key": {"dev',
    "binary": bytes(range(256)),
    "a list": b"[]",
    "a number": b"3",
    "nested": b"[" * 100_000,
    "huge": b" " * (2 << 20),
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_miss_with_a_reason_and_is_healed(tmp_path: Path, content: bytes):
    store = Store(tmp_path)
    _damaged(store.path(KEY), content)
    stored = store.get(KEY)
    assert stored.curves is None
    assert str(store.path(KEY)) in stored.reason and "is not used" in stored.reason
    assert store.entries()[0].reason
    store.put(KEY, CURVES)
    assert store.get(KEY).curves == CURVES


WRONG = {
    "future layout": {"schema": SCHEMA + 1},
    "no layout": {"schema": None},
    "no curves": {"curves": None},
    "no date": {"created": 5},
    "foreign key": {"key": {"device": "another"}},
    "wrong types": {"curves": CURVES.to_dict() | {"overhead_ms": "fast"}},
    "text as time": {"curves": CURVES.to_dict() | {"plain_ms_by_depth": {"0": "1"}}},
    "negative time": {"curves": CURVES.to_dict() | {"overhead_ms": -1}},
    "no verify": {"curves": CURVES.to_dict() | {"verify_ms_by_depth": {}}},
    "list as verify": {"curves": CURVES.to_dict() | {"verify_ms_by_depth": [1]}},
    "bad width": {"curves": CURVES.to_dict() | {"verify_ms_by_depth": {"0": {"one": 1.0}}}},
    "missing part": {"curves": {"verify_ms_by_depth": {"0": {"1": 1.0}}}},
    "acceptance of text": {"curves": CURVES.to_dict() | {"acceptance": ["x"]}},
    "temperature of zero": {"curves": CURVES.to_dict() | {"temperatures": [0.0]}},
    "block of text": {"curves": CURVES.to_dict() | {"blocks": {"dspark": "7"}}},
    "fractional block": {"curves": CURVES.to_dict() | {"max_draft": 1.5}},
    "NaN": {"curves": CURVES.to_dict() | {"noise": float("nan")}},
    "endless time": {"curves": CURVES.to_dict() | {"plain_ms_by_depth": {"0": 1e300}}},
    "time beyond floats": {"curves": CURVES.to_dict() | {"overhead_ms": 10**400}},
    "noise beyond floats": {"curves": CURVES.to_dict() | {"noise": 10**400}},
    "temperature beyond floats": {"curves": CURVES.to_dict() | {"temperatures": [10**400]}},
    "absurd draft": {"curves": CURVES.to_dict() | {"max_draft": 10**12}},
    "infinite time": {"curves": CURVES.to_dict() | {"overhead_ms": float("inf")}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_file_that_is_json_but_no_calibration_is_a_miss_with_a_reason(tmp_path: Path, change):
    store = Store(tmp_path)
    store.put(KEY, CURVES)
    _damaged(store.path(KEY), _content(store) | change)
    stored = store.get(KEY)
    assert stored.curves is None and "is not used" in stored.reason


def test_a_folder_in_the_place_of_a_file_is_a_miss(tmp_path: Path):
    store = Store(tmp_path)
    store.path(KEY).mkdir(parents=True)
    assert store.get(KEY).curves is None and store.get(KEY).reason
    assert "cannot be written" in store.put(KEY, CURVES)


def test_a_place_that_cannot_be_written_is_a_remark_not_an_error(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = Store(blocked / "folder")
    assert "is not kept" in store.put(KEY, CURVES)
    assert store.get(KEY).curves is None
    assert store.entries() == [] and store.clear() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_remark_not_an_error(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert "is not kept" in Store(tmp_path).put(KEY, CURVES)


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch):
    store = Store(tmp_path)
    store.put(KEY, CURVES)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in store.put(KEY, replace(CURVES, overhead_s=1.0))
    assert store.get(KEY).curves == CURVES
    assert [p.name for p in tmp_path.iterdir()] == [store.path(KEY).name]


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from spec_calibrate import Curve, Curves, Key, Store

folder, who = Path(sys.argv[1]), int(sys.argv[2])
key = Key(device="toy", system="os 1", mlx="0.32", packages={"spec-core": "0.1.0"}, model="abc")
curves = Curves(verify=((0, Curve((1,), (0.01,))),), plain=Curve((0,), (0.01,)), overhead_s=who)
for i in range(20):
    assert Store(folder).put(key, curves) == ""
    assert Store(folder).put(replace(key, model=f"{who}-{i}"), curves) == ""
"""


def test_processes_that_write_at_once_lose_and_damage_nothing(tmp_path: Path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(who)]) for who in (1, 2)
    ]
    store, n_reads = Store(tmp_path), 0
    while any(writer.poll() is None for writer in writers):
        stored = store.get(KEY)
        assert stored.reason == ""  # never a half-written file
        n_reads += stored.curves is not None
    assert [writer.returncode for writer in writers] == [0, 0]
    assert n_reads > 0
    final = store.get(KEY).curves
    assert final is not None and final.overhead_s in (1.0, 2.0)
    assert len(store.entries()) == 41 and all(e.reason == "" for e in store.entries())
    assert not list(tmp_path.glob(".*.tmp"))


def test_entries_list_what_is_there(tmp_path: Path):
    store = Store(tmp_path)
    store.put(KEY, CURVES)
    _damaged(tmp_path / f"{'f' * 20}.json", b"")
    good, bad = store.entries()
    assert good.key == KEY.to_dict() and good.created and not good.reason
    assert bad.key == {} and "not JSON" in bad.reason


def test_clear_deletes_one_or_all(tmp_path: Path):
    store = Store(tmp_path)
    for model in "abc":
        store.put(replace(KEY, model=model), CURVES)
    assert store.clear(replace(KEY, model="b")) == 1
    assert store.clear(replace(KEY, model="b")) == 0
    (tmp_path / "package.json").write_text("{}")  # somebody else's
    assert store.clear() == 2 and store.entries() == []
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"]


@pytest.mark.parametrize("created", ["2999-01-01T00:00:00+00:00", "yesterday", "2026-01-01"])
def test_an_age_that_no_clock_tells_is_without_end(tmp_path: Path, created: str):
    store = Store(tmp_path)
    store.put(KEY, CURVES)
    assert 0 <= store.get(KEY).age_s < 60
    _damaged(store.path(KEY), _content(store) | {"created": created})
    assert store.get(KEY).age_s == math.inf


def test_the_default_folder_is_in_the_users_cache():
    assert default_folder().parts[-2:] == ("spec", "calibration")
    assert Store().folder == default_folder()
