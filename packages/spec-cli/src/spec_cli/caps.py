"""How many drafts a command verifies a round: as pinned, as measured, or adapting every round."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_cli import env, opening, render
from spec_core import Cap, FixedCap, Pair

ADAPTIVE = "auto"
WHOLE_BLOCK = "full"
BUDGET_S = 5.0
"""Seconds that a calibration takes, about; several times that where a step takes a tenth."""


@dataclass(frozen=True, slots=True)
class Caps:
    """The cap that a command uses.

    Attributes:
        shown: What is reported as `max_draft`: a number, or "auto".
        make: A new cap. The adaptive one learns from text to text, so keep it where you can.
        most: Largest cap it can ask for.
        key: Short name of the calibration that it follows from; empty for none.
        guessed: That calibration had no time to measure every width.
    """

    shown: int | str
    make: Callable[[], Cap]
    most: int
    key: str = ""
    guessed: bool = False

    def __str__(self) -> str:
        """In words, with the calibration."""
        by = f", calibration {self.key}" if self.key else ""
        return f"max-draft {self.shown}{by}"


def caps_for(opened: opening.Opened, pair: Pair, options: dict[str, Any]) -> Caps:
    """The cap that `--max-draft` asks for.

    A number is never overridden, only cut to what the drafter can do, with a notice. "full" is the
    drafter's whole block. "auto" adapts every round, and without a wish it is the best fixed cap:
    both from a calibration of this machine and pair, which is made now if there is none.
    """
    wish, most = options["max_draft"], pair.max_draft
    if pair.drafter is None and wish:
        render.note("[draft] --max-draft changes nothing for baseline. Leave it out.")
    if pair.drafter is None or wish == WHOLE_BLOCK:
        return _fixed(most)
    if isinstance(wish, int):
        if wish > most:
            render.note(
                f"[draft] {pair.drafter.name} drafts at most {most} tokens a round; "
                f"--max-draft {wish} is cut to that."
            )
        return _fixed(min(wish, most))
    if wish == ADAPTIVE:
        return _adaptive(opened, pair, options, most)
    from spec_calibrate import best_cap

    found = calibration_of(opened, pair, options)
    cap = best_cap(found.curves, max_draft=most).cap
    return _fixed(cap, found.key.digest, guessed=found.guessed)


def store() -> Any:
    """Where this user's calibrations lie."""
    from spec_calibrate import Store

    return Store(env.calibration_dir())


def calibration_of(
    opened: opening.Opened, pair: Pair, options: dict[str, Any], *, anew: bool = False
) -> Any:
    """The stored calibration of a set-up, or a new one; remarks go to stderr."""
    from spec_calibrate import calibrate, load_or_measure

    call = calibrate if anew else load_or_measure
    key = key_of(opened, pair, options)
    told: list[str] = []  # for when the bar has gone
    with render.progress("measuring what drafts cost here", unit=""):
        found = call(pair, key, store=store(), budget_s=BUDGET_S, notify=told.append)
    for remark in told:
        render.note(remark)
    return found


def row_costs(opened: opening.Opened, pair: Pair, options: dict[str, Any]) -> Any:
    """Costs of verifies that several sequences share; measured when first asked for."""
    from spec_calibrate import RowCurves

    return RowCurves(
        pair.target,
        pair.max_draft + 1,
        taps=pair.taps,
        key=key_of(opened, pair, options),
        store=store(),
    )


def key_of(opened: opening.Opened, pair: Pair, options: dict[str, Any]) -> Any:
    """What a calibration of this set-up is valid for."""
    from spec_calibrate import key_for

    return key_for(
        model=_identity(opened.folder) if opened.folder is not None else opened.name,
        quantisation=opened.quantisation,
        kv_bits=int(options.get("kv_bits") or 16),
        drafter=_drafter_key(pair, options),
        kernels=_kernels(opened.target, options),
    )


def remarks(chosen: Caps, cap: Cap, target: Any) -> list[str]:
    """What a line of statistics ends with: what the cap did, and which kernels compute."""
    status = getattr(cap, "status", None)  # of an adaptive one
    found = [status.reason] if status is not None else []
    if chosen.key and chosen.shown == 0 and chosen.guessed:
        found.append("no drafts is a guess: too little could be measured (spec calibrate does)")
    elif chosen.key and chosen.shown == 0:
        found.append("plain decoding measured fastest here (spec calibrate shows it)")
    return found + _kernel_remarks(target)


def _kernel_remarks(target: Any) -> list[str]:
    """Which few-row kernels compute, or why they stopped; nothing where there are none."""
    installed = getattr(target, "kernels", None)
    report = installed.report() if installed is not None else None
    if report is None or not report.ops:
        return []
    if not report.on:
        return [f"kernels off: {report.reason}"]
    served = [f"{rows} rows" for arm, rows in report.arms.items() if arm != "stock"]
    replayed = sorted(getattr(target, "replayed_rows", ()))
    graphs = [f"graphs of {', '.join(map(str, replayed))} rows"] if replayed else []
    return [f"kernels: {', '.join(served + graphs) or 'attention'}"]


def _fixed(n: int, key: str = "", *, guessed: bool = False) -> Caps:
    return Caps(n, lambda: FixedCap(n), n, key, guessed)


def _adaptive(opened: opening.Opened, pair: Pair, options: dict[str, Any], most: int) -> Caps:
    from spec_calibrate import CapController

    found = calibration_of(opened, pair, options)
    key = found.key.digest
    return Caps(ADAPTIVE, lambda: CapController(found.curves, max_draft=most), most, key)


def _drafter_key(pair: Pair, options: dict[str, Any]) -> str:
    """The drafter with everything that changes what it costs or how often it is right."""
    drafter = pair.drafter
    if drafter is None:
        return ""
    given, threshold = options.get("drafter"), options["confidence_threshold"]
    bits, window = options["drafter_bits"], options["drafter_window"]
    weights = str(given or "")
    if given is not None and Path(given).is_dir():
        weights = _identity(Path(given))
    parts = (
        drafter.name,
        weights,
        f"block {drafter.max_draft}",
        f"bits {opening.DRAFTER_BITS if bits is None else bits}",
        f"window {opening.DRAFTER_WINDOW if window is None else window}",
        "" if threshold is None else f"threshold {threshold:g}",
    )
    return ", ".join(part for part in parts if part)


def _kernels(target: Any, options: dict[str, Any]) -> str:
    """State of what computes: the few-row kernels that won, exact mode, a BLAS put in front."""
    installed = getattr(target, "kernels", None)
    parts: list[str] = []
    if installed is not None:
        report = installed.report()
        used = [f"{op.op} {op.shape} {op.kernel} {op.serves}" for op in report.ops]
        used += [f"{arm} {rows}" for arm, rows in report.arms.items()]
        parts += sorted(used) if report.on else ["stock kernels"]
    parts += ["exact"] if options.get("exact") else []
    parts += [Path(name).name for name in env.preloaded().split(":") if name]
    return ", ".join(parts)


def _identity(folder: Path) -> str:
    from spec_calibrate import model_identity

    return model_identity(folder)
