import io
import json

import pytest
from rich.console import Console

from spec_calibrate import Curve, Curves, Store
from spec_cli import render

KEYS = {
    "key", "verify_ms", "verify_ms_by_depth", "draft_ms", "overhead_ms", "chosen_cap",
    "expected_speedup", "created", "cached",
}  # fmt: skip


@pytest.fixture
def store(tmp_path) -> Store:
    """The store that the fixture `spec` works with."""
    return Store(tmp_path / "cache" / "calibration")


def measured(spec, tiny_folder, *arguments):
    code, out, err = spec("calibrate", "--model", tiny_folder, "--json", *arguments)
    assert code == 0, err
    return json.loads(out)


def answer(spec, tiny_folder, *arguments):
    code, out, err = spec(
        "generate", "Name three rivers.", "--model", tiny_folder, "--max-tokens", 24, "--json",
        *arguments,
    )  # fmt: skip
    assert code == 0, err
    return json.loads(out)


def replace_curves(store: Store, row_ms: float) -> None:
    """Rewrite the stored calibration with a verify of 1 ms and so much for each further row."""
    (entry,) = store.entries()
    value = json.loads(entry.path.read_text())
    widths = tuple(range(1, 34))
    curves = Curves(
        verify=((64, Curve(widths, tuple(1e-3 * (1 + row_ms * (w - 1)) for w in widths))),),
        plain=Curve((64,), (1e-3,)),
        draft={"lookup": Curve((1,), (1e-6,))},
        acceptance=(0.9,),
        max_draft=32,
    )
    entry.path.write_text(json.dumps(value | {"curves": curves.to_dict()}))


def test_json_is_one_object_with_the_documented_keys(spec, tiny_folder):
    result = measured(spec, tiny_folder)
    assert set(result) >= KEYS
    assert result["cached"] is False
    assert result["verify_ms"]["1"] > 0 and len(result["verify_ms"]) >= 3
    assert set(result["draft_ms"]) == {"lookup"}
    assert 0 <= result["chosen_cap"] <= 32 and result["expected_speedup"] >= 1
    assert result["key"]["drafter"].startswith("lookup") and result["key"]["kv_bits"] == 16


def test_the_table_shows_caps_and_the_chosen_one(spec, tiny_folder):
    code, out, _ = spec("calibrate", "--model", tiny_folder)
    assert code == 0
    assert "expected speed-up" in out and "chosen" in out and "knee" in out


def test_the_stored_calibration_is_shown_on_request_and_measured_anew_without(spec, tiny_folder):
    first = measured(spec, tiny_folder)
    again = measured(spec, tiny_folder, "--cached")
    assert again["cached"] is True and again["created"] == first["created"]
    assert measured(spec, tiny_folder)["cached"] is False


def test_another_set_up_is_not_served_by_it(spec, tiny_folder):
    measured(spec, tiny_folder)
    assert measured(spec, tiny_folder, "--cached", "--drafter-bits", 8)["cached"] is False
    assert measured(spec, tiny_folder, "--cached")["cached"] is True


def test_a_terminal_is_told_why_it_waits(spec, tiny_folder, monkeypatch):
    told, progress = [], render.progress
    monkeypatch.setattr(render, "progress", lambda *a, **k: told.append(a[0]) or progress(*a, **k))
    measured(spec, tiny_folder)
    assert told == ["measuring what drafts cost here"]
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60)
    monkeypatch.setattr(render, "_stderr", terminal)
    measured(spec, tiny_folder)
    assert "measuring what drafts cost here" in terminal.file.getvalue()


def test_clear_forgets_everything(spec, tiny_folder, store):
    measured(spec, tiny_folder)
    assert len(store.entries()) == 1
    code, out, _ = spec("calibrate", "--clear", "--json")
    assert (code, json.loads(out)["cleared"]) == (0, 1)
    assert store.entries() == []


def test_a_plot_is_written(spec, tiny_folder, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("plot.png", "plot.svg"):
        code, _, err = spec("calibrate", "--model", tiny_folder, "--plot", tmp_path / name)
        assert code == 0, err
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "message"), [("plot.pdf", ".png or .svg"), ("no/folder/plot.png", "must exist")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(spec, tmp_path, name, message):
    code, _, err = spec("calibrate", "--plot", tmp_path / name)
    assert code == 2 and message in err


def test_auto_adapts_and_gives_the_ids_of_plain_decoding(spec, tiny_folder, store):
    plain = answer(spec, tiny_folder, "--mode", "baseline")
    auto = answer(spec, tiny_folder, "--max-draft", "auto")
    assert auto["token_ids"] == plain["token_ids"]
    assert auto["max_draft"] == "auto" and auto["mode"] == "lookup"
    assert len(store.entries()) == 1  # calibrated on the way


def test_auto_says_what_it_did(spec, tiny_folder):
    code, _, err = spec(
        "generate", "Hi", "--model", tiny_folder, "--max-tokens", 8, "--max-draft", "auto"
    )
    assert code == 0 and any(says in err for says in ("Parked", "A cap of", "plain step"))


def test_without_a_wish_the_best_measured_cap_is_used(spec, tiny_folder, store):
    answer(spec, tiny_folder)
    assert len(store.entries()) == 1  # nothing was known: measured on the way
    replace_curves(store, row_ms=2.0)
    assert answer(spec, tiny_folder)["max_draft"] == 0
    replace_curves(store, row_ms=0.1)
    assert 4 <= answer(spec, tiny_folder)["max_draft"] <= 16


def test_a_pinned_cap_is_not_touched_by_a_calibration(spec, tiny_folder, store):
    measured(spec, tiny_folder)
    replace_curves(store, row_ms=2.0)
    assert answer(spec, tiny_folder, "--max-draft", 5)["max_draft"] == 5
    assert answer(spec, tiny_folder, "--max-draft", "full")["max_draft"] == 32
    replace_curves(store, row_ms=0.0)
    assert answer(spec, tiny_folder, "--max-draft", 0)["draft_tokens"] == 0


def test_a_damaged_calibration_is_a_remark_and_the_answer_is_given(spec, tiny_folder, store):
    measured(spec, tiny_folder)
    (entry,) = store.entries()
    entry.path.write_bytes(b"{")
    code, out, err = spec(
        "generate", "Hi", "--model", tiny_folder, "--max-tokens", 4, "--json", "--max-draft", "auto"
    )
    assert code == 0 and err.count("is not used") == 1
    assert len(json.loads(out)["token_ids"]) == 4
    assert store.entries()[0].reason == ""


def test_doctor_lists_calibrations_and_damaged_ones(spec, tiny_folder, store):
    assert json.loads(spec("doctor", "--json")[1])["calibrations"] == []
    measured(spec, tiny_folder)
    (line,) = json.loads(spec("doctor", "--json")[1])["calibrations"]
    assert "lookup" in line and "mlx" in line
    (store.folder / f"{'f' * 20}.json").write_bytes(b"")
    assert "cannot be used" in json.loads(spec("doctor", "--json")[1])["calibrations"][1]


@pytest.mark.parametrize("value", ["many", "-1", "1.5", ""])
def test_a_cap_that_is_none_is_a_usage_error(spec, tiny_folder, value):
    code, _, err = spec("generate", "Hi", "--model", tiny_folder, "--max-draft", value)
    assert code == 2 and '"full" or "auto"' in err


@pytest.mark.parametrize("other", [("--cached",), ("--plot", "a.png")])
def test_clear_with_something_to_show_deletes_nothing(spec, tiny_folder, store, other):
    measured(spec, tiny_folder)
    code, out, err = spec("calibrate", "--clear", *other)
    assert (code, out) == (2, "") and "leave --cached and --plot out" in err
    assert len(list(store.folder.glob("*.json"))) == 1
