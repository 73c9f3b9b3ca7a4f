"""Pictures: of a calibration (verify by width, draft and expected speedup by cap), and of a race.

Needs the extra `plot` (matplotlib), imported when a picture is asked for. Knows nothing about how
the figures were measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_calibrate.curves import Curves, knee
from spec_calibrate.expected import best_cap, speedups

FORMATS = (".png", ".svg")

_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#1f5f99", "#c8641e", "#2f7d4f", "#777777", "#b3261e"
_COLOURS = (_BLUE, "#6aa5d8", "#9ec9ee")
_SOURCES = (_ORANGE, _GREEN, _BLUE)
_MODES = (_GREY, _BLUE, _ORANGE, _GREEN, "#7a5195", _RED)
_LEVELS = ((0.5, ":"), (0.9, "--"))  # acceptance rates shown for comparison


def save_plot(curves: Curves, path: Path, *, title: str = "") -> None:
    """Draw curves into a file, PNG or SVG by its suffix.

    Args:
        curves: What to draw.
        path: File to write; its folder must exist.
        title: Heading, such as model and device.

    Raises:
        ValueError: the suffix is another one.
        ImportError: matplotlib is not installed; the message says how to get it.
    """
    figure = _figure(path, 14, title)
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"wspace": 0.06})
    _draw_verify(left, curves)
    _draw_draft(middle, curves)
    _draw_speedup(right, curves)
    for axes in (left, middle, right):
        _tidy(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=130)


def save_race(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Draw the rows of `spec benchmark --json` into a file: speedup by prompt set and mode.

    Args:
        rows: One per mode and prompt set, with `mode`, `prompts`, `speedup` (None where nothing was
            decoded) and `tokens_per_second`.
        path: As for `save_plot`, also in what it raises.
        title: Heading, such as model and device.
    """
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure = _figure(path, max(7.0, 1.6 * len(sets) + 0.5 * len(sets) * len(modes)), title)
    axes = figure.subplots()
    width = 0.84 / len(modes)
    for n, mode in enumerate(modes):
        found = {row["prompts"]: row for row in rows if row["mode"] == mode}
        at = [s + (n - (len(modes) - 1) / 2) * width for s in range(len(sets))]
        heights = [found[name]["speedup"] or 0.0 for name in sets]
        bars = axes.bar(at, heights, 0.92 * width, color=_MODES[n % len(_MODES)], label=mode)
        texts = [f"{found[name]['tokens_per_second']:.0f}" for name in sets]
        axes.bar_label(bars, texts, padding=2, fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set(
        xlabel="prompt set (numbers on the bars: tokens per second)",
        ylabel="speed / plain decoding",
        xticks=range(len(sets)),
        xticklabels=sets,
    )
    axes.set_ylim(bottom=0, top=1.3 * max((row["speedup"] or 0.0 for row in rows), default=1.0))
    axes.legend(loc="upper left", frameon=False, fontsize=9, ncols=min(len(modes), 5))
    _tidy(axes)
    figure.savefig(path, dpi=130)


def _figure(path: Path, inches: float, title: str) -> Any:
    """An empty figure of that width for a file of a known kind."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(
            f'[plot] The file must end in .png or .svg, got "{path.name}". Choose one of them.'
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "[plot] Plots need matplotlib, which is not installed. "
            'Install it: pip install "spec-calibrate[plot]".'
        ) from None
    figure = Figure(figsize=(inches, 4.8), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def _tidy(axes: Any) -> None:
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_verify(axes: Any, curves: Curves) -> None:
    """Milliseconds of a verify by width, for each depth, with the knee of the shallow one."""
    for (depth, curve), colour in zip(curves.verify, _COLOURS, strict=False):
        ms = [s * 1e3 for s in curve.seconds]
        axes.plot(curve.at, ms, "o-", color=colour, label=f"context {depth} tokens", markersize=5)
    plain_ms = curves.plain_s(curves.verify[0][0]) * 1e3
    axes.axhline(plain_ms, color=_GREY, linestyle="--", label="plain step, pipelined")
    shallow = curves.verify[0][1]
    bend = knee(shallow)
    if bend is not None:
        ms = shallow(bend) * 1e3
        axes.vlines(bend, 0, ms, color=_RED, linewidth=1.2)
        ring = {"markerfacecolor": "none", "markeredgewidth": 2, "markersize": 13}
        axes.plot([bend], [ms], "o", color=_RED, label=f"knee: {bend} rows", **ring)
    axes.set(title="Verify", xlabel="width (rows: anchor + drafts)", ylabel="time (ms)")
    axes.set_ylim(bottom=0, top=_headroom(axes, 0.35))
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_draft(axes: Any, curves: Curves) -> None:
    """Milliseconds of a draft by cap for each source, and the overhead of a round."""
    axes.set(title="Draft", xlabel="cap (drafts asked for)", ylabel="time (ms)")
    if not curves.draft:
        axes.text(0.5, 0.5, "no drafter", transform=axes.transAxes, ha="center", color=_GREY)
        return
    for (source, curve), colour in zip(curves.draft.items(), _SOURCES, strict=False):
        caps = list(range(1, max(curves.max_draft, 1) + 1))
        axes.plot(caps, [curve(c) * 1e3 for c in caps], "o-", color=colour, label=source)
    axes.axhline(curves.overhead_s * 1e3, color=_GREY, linestyle="--", label="overhead of the loop")
    axes.set_ylim(bottom=0, top=_headroom(axes, 0.3))
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_speedup(axes: Any, curves: Curves) -> None:
    """Expected speed over plain decoding by cap, with the chosen cap marked."""
    caps = range(curves.max_draft + 1)
    chosen = best_cap(curves)
    seen = "acceptance as measured" if curves.acceptance else "typical acceptance, 70%"
    for rate, style in _LEVELS:
        label = f"acceptance {rate:.0%}"
        gains = speedups(curves, acceptance=(rate,))
        axes.plot(caps, gains, style, color=_GREY, label=label, linewidth=1.3)
    axes.plot(caps, speedups(curves), "o-", color=_BLUE, label=seen, markersize=5)
    axes.axhline(1.0, color="black", linewidth=1.0)
    mark = f"chosen cap: {chosen.cap} ({chosen.speedup:.2f}x)"
    axes.plot([chosen.cap], [chosen.speedup], "*", color=_RED, markersize=17, label=mark, zorder=5)
    axes.set(
        title="Expected speedup",
        xlabel="cap (drafts verified a round, 0 = plain)",
        ylabel="tokens per second / plain decoding",
    )
    axes.set_ylim(bottom=0, top=_headroom(axes, 0.45))
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _headroom(axes: Any, share: float) -> float:
    """Upper limit that leaves a share of the height for the legend."""
    return axes.dataLim.y1 * (1.0 + share) or 1.0
