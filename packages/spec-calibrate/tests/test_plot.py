import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from spec_calibrate.scenarios import DEEP, KNEE

pytest.importorskip("matplotlib", reason="plots need the extra spec-calibrate[plot]")

from spec_calibrate.plot import save_plot, save_race

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the extra spec-calibrate[plot]"
)
CURVES = replace(DEEP.curves(8), acceptance=(0.8, 0.75))


def _texts(path: Path) -> str:
    """Everything written in an SVG: matplotlib keeps each text as a comment or an element."""
    return path.read_text(encoding="utf-8")


@needs_matplotlib
def test_a_png_is_written(tmp_path: Path):
    save_plot(CURVES, tmp_path / "plot.png", title="toy on a toy machine")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000


@needs_matplotlib
def test_an_svg_names_axes_units_knee_and_chosen_cap(tmp_path: Path):
    path = tmp_path / "plot.svg"
    save_plot(CURVES, path, title="toy on a toy machine")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    texts = _texts(path)
    for words in (
        "toy on a toy machine",
        "time (ms)",
        "width (rows: anchor + drafts)",
        "cap (drafts asked for)",
        "tokens per second / plain decoding",
        "knee: 6 rows",
        "chosen cap: 5",
        "context 2048 tokens",
        "scripted",
    ):
        assert words in texts


@needs_matplotlib
def test_curves_without_a_drafter_are_drawn_too(tmp_path: Path):
    bare = replace(KNEE.curves(1), draft={}, max_draft=0)
    save_plot(bare, tmp_path / "plot.svg")
    assert "no drafter" in _texts(tmp_path / "plot.svg")
    assert "knee" not in _texts(tmp_path / "plot.svg")


def test_another_format_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r'must end in .png or .svg, got "plot.pdf"'):
        save_plot(CURVES, tmp_path / "plot.pdf")


def test_without_matplotlib_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "spec-calibrate\[plot\]"'):
        save_plot(CURVES, tmp_path / "plot.png")


ROWS = [
    {"mode": mode, "prompts": name, "speedup": speedup, "tokens_per_second": 100.0 * (speedup or 0)}
    for name, pair in {"code": (1.0, 2.5), "copy": (1.0, None)}.items()
    for mode, speedup in zip(("baseline", "dspark"), pair, strict=True)
]


@needs_matplotlib
def test_a_race_names_its_sets_modes_axes_and_speeds(tmp_path: Path):
    path = tmp_path / "race.svg"
    save_race(ROWS, path, title="toy race")
    texts = _texts(path)
    words = ("toy race", "code", "copy", "baseline", "dspark", "250", "speed / plain decoding")
    for word in (*words, "prompt set (numbers on the bars: tokens per second)"):
        assert word in texts


@needs_matplotlib
def test_a_race_refuses_another_kind_of_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r'must end in \.png or \.svg, got "race\.gif"'):
        save_race(ROWS, tmp_path / "race.gif")
