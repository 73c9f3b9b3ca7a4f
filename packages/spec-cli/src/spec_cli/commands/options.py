"""Options that several commands share, and what they mean."""

import math
from collections.abc import Callable
from typing import Any

import click

from spec_cli import opening

_MOST_DIGITS = 4000  # Python reads no longer number
MODES = ("auto", "dspark", "dflash", "eagle3", "draft-model", "lookup", "baseline")
_WITHOUT_WEIGHTS = ("lookup", "baseline")


class MaxDraft(click.ParamType):
    """A number of drafts, "full" for the drafter's whole block, or "auto" to adapt."""

    name = "N|full|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Check one value."""
        if value in ("full", "auto") or isinstance(value, int):
            return value
        if not str(value).isdecimal() or len(value) > _MOST_DIGITS:
            self.fail(f'"{value}" must be a number >= 0, "full" or "auto".', param, ctx)
        return int(value)


def _named(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """An empty name is that of an unset variable in a script, not of the current folder."""
    if value is not None and not value.strip():
        raise click.BadParameter("must be a folder or an id, got an empty text. Leave it out.")
    return value


class Finite(click.FloatRange):
    """A number in a range; NaN is in none, and infinity is no number of anything here."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Check one value."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} must be a finite number.", param, ctx)
        return number


_MODEL = [
    click.option(
        "--model",
        callback=_named,
        help="Folder, Hugging Face id, or gguf:FILE.  [default: the embedded one]",
    ),
    click.option(
        "--kv-bits",
        type=click.Choice(["4", "8"]),
        help="Pack keys and values in this many bits, from the first token.",
    ),
    click.option(
        "--kernels",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Few-row kernels: auto races them once where they were measured (NVIDIA), on also on "
        "other GPUs.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Let a checkpoint's own Python run."),
]
_DRAFTER = [
    click.option(
        "--lookup-drafts/--no-lookup-drafts",
        default=None,
        help="Lookup in front of the drafter.  [default: what the pair says]",
    ),
    click.option(
        "--max-draft",
        type=MaxDraft(),
        help="Most drafted tokens a round; 0 = plain, auto = adapts every round.  "
        "[default: the best one as measured on this machine, once]",
    ),
    click.option(
        "--confidence-threshold",
        type=Finite(0, 1),
        help="Cut a draft before the first token the drafter trusts less; 0 = off.",
    ),
    click.option(
        "--drafter-bits",
        type=click.Choice(["4", "8", "16"]),
        help=f"Of its weights.  [default: {opening.DRAFTER_BITS}]",
    ),
    click.option(
        "--drafter-window",
        type=click.IntRange(0),
        help=f"Newest rows a drafter sees; 0 = all.  [default: {opening.DRAFTER_WINDOW}]",
    ),
]
_SAMPLING = [
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 = off."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, help="Repeats a sampled answer of the same mode."),
]


def _stacked(options: list[Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = _stacked(_MODEL)
drafter_option = click.option(
    "--drafter", callback=_named, help="Folder or hub id of a drafter's weights."
)
drafter_options = _stacked(_DRAFTER)
sampling_options = _stacked(_SAMPLING)


def sampling_of(options: dict[str, Any]) -> Any:
    """The sampling settings; a value outside its range is a usage error."""
    from spec_core import Sampling

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    try:
        return Sampling(**{name: options[name] for name in names})
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def is_unicode(text: str) -> bool:
    """False for bytes that are no UTF-8; Python reads them as surrogates (stdin: in a C locale)."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def texts_of(options: dict[str, Any], *texts: str) -> None:
    """Refuse texts that are no Unicode, and empty stop strings."""
    given = (*texts, options["system"] or "", *options["stop"])
    if not all(map(is_unicode, given)):
        raise click.UsageError("The prompt, --system and --stop must be UTF-8, got other bytes.")
    if "" in options["stop"]:
        raise click.UsageError("--stop must have at least one character, got none.")


def refuse_unused(options: dict[str, Any], *modes: str) -> None:
    """Refuse drafter options where no mode has a drafter with weights, or say so."""
    if any(mode not in _WITHOUT_WEIGHTS for mode in modes):
        return
    for name in ("drafter", "confidence_threshold", "lookup_drafts"):
        if options.get(name) is not None:
            raise click.UsageError(
                f"--{name.replace('_', '-')} needs a mode whose drafter has weights, got --mode "
                f"{', '.join(modes)}. Leave one of them out."
            )
    for name in ("bits", "window"):  # which a script passes to each of its modes
        if options[f"drafter_{name}"] is not None:
            opening.remark_unused(name, " and ".join(modes))


def wish_of(options: dict[str, Any], mode: str, drafter: str | None) -> opening.Wish:
    """What the drafter options ask for, in one mode."""
    if mode in _WITHOUT_WEIGHTS:
        return opening.Wish(mode)
    bits = options["drafter_bits"]
    found = {
        "bits": None if bits is None else int(bits),
        "window": options["drafter_window"],
        "confidence_threshold": options["confidence_threshold"],
        "lookup_drafts": options["lookup_drafts"],
    }
    given = {name: value for name, value in found.items() if value is not None}
    return opening.Wish(mode, drafter, given)


def kv_bits_of(options: dict[str, Any]) -> int | None:
    """Bits of packed keys and values, if asked for."""
    return None if options["kv_bits"] is None else int(options["kv_bits"])


def open_target(options: dict[str, Any], *, split: bool = False) -> opening.Opened:
    """The target that the model options ask for; `split` if the command knows several processes."""
    return opening.open_target(
        options["model"],
        exact=options.get("exact", False),
        kv_bits=kv_bits_of(options),
        kernels=options["kernels"],
        split=split,
        trust_remote_code=options["trust_remote_code"],
    )


def names_of(drafter: Any) -> tuple[str, str | None]:
    """The mode that runs, and what drafts: ("dspark", "lookup+dspark")."""
    if drafter is None:
        return opening.BASELINE, None
    other = getattr(drafter, "other", None)
    if other is None:
        return drafter.name, drafter.name
    return other.name, drafter.name
