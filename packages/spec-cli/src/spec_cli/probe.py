"""Proof on the user's own machine, as one page to paste into a report: `spec doctor --probe`.

Kernels one by one, then decoding: tiny random models of several families and the embedded default,
plainly and with drafts, ids compared. The page holds no user name and no path.

The tiny models are float32, and so are their products here: in TF32 a block of rows may round more
coarsely than a row alone, by more than the smallest gaps between random logits.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from spec_cli import opening
from spec_core import FixedCap, Pair, SpecError, StatsMeter, generate
from spec_core.toys import ScriptedDrafter
from spec_kernels.probe import Outcome, Probe, probes

FAMILIES = ("llama", "gemma3_text", "qwen3_5", "lfm2", "nemotron_h", "deepseek_v3")
PROMPT = [5, 9, 12, 7, 5, 9, 12, 7, 5, 9, 12]  # repeats, so that lookup drafts
QUESTIONS = ("Write the numbers from one to ten in words.", "Repeat: red, green, blue, red, green")
_TOKENS, _CAP = 24, 4


def kernel_probes() -> Iterator[Probe]:
    """Every kernel of this backend, and the references."""
    yield from probes()


def decoding_probes() -> Iterator[Probe]:
    """Ids with drafts against ids of plain decoding."""
    for model_type in FAMILIES:
        yield from _tiny(model_type)
    yield from _embedded(exact=False)
    yield from _embedded(exact=True)


def page(report: dict[str, Any]) -> list[str]:
    """The report as lines of Markdown."""
    lines = ["# spec doctor --probe", ""]
    for key in ("machine", "versions"):
        found = ", ".join(f"{name} {value}" for name, value in report[key].items())
        lines.append(f"- {key}: {found}")
    lines.append(f"- kernels: {report['kernels']}")
    lines += [f"- problem: {text}" for text in report["problems"]]
    for title in ("kernels", "decoding"):
        lines += ["", f"| {title} | | seconds | |", "| --- | --- | --- | --- |"]
        for probe in report["probes"]:
            if probe["group"] == title:
                detail = probe["detail"].replace("|", "\\|")
                cells = (probe["name"], probe["outcome"], f"{probe['seconds']:.2f}", detail)
                lines.append(f"| {' | '.join(cells)} |")
    counts = report["counts"]
    return [*lines, "", ", ".join(f"{n} {outcome}" for outcome, n in counts.items())]


def report_of(examined: dict[str, Any], on_probe: Callable[[int], None]) -> dict[str, Any]:
    """Run everything.

    Args:
        examined: What `spec doctor` found: machine, versions, kernels, problems.
        on_probe: Called with the number of probes done.
    """
    rows: list[dict[str, Any]] = []
    for group, found in (("kernels", kernel_probes()), ("decoding", decoding_probes())):
        for probe in found:
            row = {"group": group, **asdict(probe)}
            rows.append({**row, "detail": scrubbed(probe.detail)})
            on_probe(len(rows))
    outcomes = [row["outcome"] for row in rows]
    return {
        "machine": examined["machine"],
        "versions": examined["versions"],
        "kernels": examined["kernels"]["reason"],
        "problems": [scrubbed(text) for text in examined["problems"]],
        "probes": rows,
        "counts": {name: outcomes.count(name) for name in ("pass", "fail", "skip")},
    }


def scrubbed(text: str) -> str:
    """The text on one line, with of every path its last part alone, and the home folder as ~."""
    text = " ".join(text.split()).replace(str(Path.home()), "~")
    # Between quotes a path may hold spaces, of which its owner's name is often one.
    text = re.sub(r'"(?:[A-Za-z]:|~)?[/\\][^"]*[/\\]([^"/\\]+)"', r'"…/\1"', text)
    folder = r"(?<![\w.)\]…])(?:[A-Za-z]:)?(?:~?[/\\])(?:[^\s\"':;,()<>/\\]+[/\\])+"
    return re.sub(folder, "…/", text)


# -- decoding ------------------------------------------------------------------------------------


def _tiny(model_type: str) -> Iterator[Probe]:
    """A tiny random model: lookup, and a drafter that is right and wrong by plan."""
    from spec_drafters import LookupDrafter
    from spec_targets import MlxTarget
    from spec_targets.families import FAMILIES as KNOWN
    from spec_targets.tiny import VOCAB, tiny_model

    try:
        model = tiny_model(model_type)
        target = MlxTarget(model, KNOWN[model_type], model_type, 512, n_heads=4)
        plain = _Run(Pair(target), PROMPT)
    except Exception as error:  # a driver or an unknown MLX fails in its own ways: report it
        yield Probe(f"tiny {model_type}", "fail", f"{type(error).__name__}: {error}", 0.0)
        return
    planned = ScriptedDrafter(plain.ids, len(PROMPT), VOCAB, max_draft=_CAP, wrong_at=(4,))
    for drafter in (LookupDrafter(), planned):
        name = f"tiny {model_type}, {drafter.name}"
        yield _compared(name, plain, partial(_Run, Pair(target, drafter), PROMPT))


def _embedded(*, exact: bool) -> Iterator[Probe]:
    """The embedded default with its own drafter and with lookup."""
    name = "embedded default" + (", exact" if exact else "")
    try:
        opened = opening.open_target(None, exact=exact)
        questions = QUESTIONS[:1] if exact else QUESTIONS
        prompts = [opened.tokenizer.encode_chat([_asked(text)]) for text in questions]
        pairs = [(mode, opened.pair(opening.Wish(mode))) for mode in ("dspark", "lookup")]
        plain = [_Run(opened.pair(opening.Wish("baseline")), ids) for ids in prompts]
    except SpecError as error:
        yield Probe(name, "skip", str(error), 0.0)
        return
    except Exception as error:  # as above
        refused = exact and type(error).__name__ == "ExactError"
        outcome: Outcome = "skip" if refused else "fail"
        yield Probe(name, outcome, f"{type(error).__name__}: {error}", 0.0)
        return
    for mode, pair in pairs:
        for n, (ids, before) in enumerate(zip(prompts, plain, strict=True), 1):
            run = partial(_Run, pair, ids)
            yield _compared(f"{name}, {mode}, prompt {n}", before, run, ties=not exact)


def _asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class _Run:
    """One greedy generation: ids, where the two best logits tie, figures."""

    def __init__(self, pair: Pair, prompt: Sequence[int]) -> None:
        meter, self.ids, self.ties = StatsMeter(), [], list[int]()
        settings = {"max_tokens": _TOKENS, "cap": FixedCap(_CAP), "stop_ids": ()}
        for round_ in generate(pair, prompt, **settings):
            meter.add(round_)
            self.ties += [len(self.ids)] * bool(round_.near_ties and len(round_.tokens) == 1)
            self.ids += round_.tokens
        self.stats = meter.result()


def _compared(name: str, plain: _Run, run: Callable[[], _Run], *, ties: bool = True) -> Probe:
    """Equal ids pass; a first difference passes only where the plain run has a near tie.

    Args:
        name: Of the probe.
        plain: The run without drafts.
        run: Makes the run with drafts.
        ties: False allows none.
    """
    start = time.perf_counter()
    try:
        other = run()
    except Exception as error:  # as above
        seconds = time.perf_counter() - start
        return Probe(name, "fail", f"{type(error).__name__}: {error}", seconds)
    seconds, stats = time.perf_counter() - start, other.stats
    detail = (
        f"{stats.n_accepted} of {stats.n_drafted} drafts accepted, {stats.near_ties} near ties, "
        f"{stats.tokens_per_second:.1f} against {plain.stats.tokens_per_second:.1f} tok/s"
    )
    if other.ids == plain.ids:
        return Probe(name, "pass", detail, seconds)
    pairs = zip(plain.ids, other.ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.ids), len(other.ids)))
    if ties and at in plain.ties:
        return Probe(name, "pass", f"{detail}; ids part at token {at}, a near tie", seconds)
    return Probe(name, "fail", f"ids differ from token {at} on; {detail}", seconds)
