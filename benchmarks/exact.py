"""Exact mode on a real model: lookup and a drafter must give plain decoding's ids, no tie excepted.

    uv run benchmarks/exact.py --model FOLDER --drafter FOLDER --prompts 100 --tokens 256
    uv run benchmarks/exact.py --model FOLDER --drafter FOLDER --price --prompts 8

The first form loads the target with exact=True, decodes every prompt plainly, with lookup and with
the drafter, with the longest drafts that a round may verify, and exits 1 when any ids differ.
`--part I/N` takes every N-th prompt, so that several processes can share the work. The second form
tells what exactness costs: tokens per second with and without it, in turn.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_cli import opening
from spec_cli.env import kernel_verdicts, prepare_mlx
from spec_core import FixedCap, Pair, StatsMeter, generate
from spec_drafters import LookupDrafter, load_drafter
from spec_targets import load_target

PROMPTS = Path(opening.__file__).parent / "prompts.jsonl"
ENDINGS = (
    "",
    " Be brief.",
    " Give an example.",
    " Explain it to a child.",
    " Use a numbered list.",
)


def prompts(n: int) -> list[str]:
    """The bundled prompts, then the same with another ending each, and so on."""
    rows = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    varied = [row + ending for ending in ENDINGS for row in rows]
    if n > len(varied):
        sys.exit(f"--prompts must be at most {len(varied)}, got {n}.")
    return varied[:n]


def decode(pair: Pair, ids: list[int], n: int) -> tuple[list[int], StatsMeter]:
    """Ids of one answer, and its figures."""
    meter, tokens = StatsMeter(), []
    for round_ in generate(pair, ids, max_tokens=n, cap=FixedCap(pair.max_draft)):
        meter.add(round_)
        tokens += round_.tokens
    return tokens, meter


def dtype_of(given: argparse.Namespace) -> mx.Dtype | None:
    """What to compute in."""
    return getattr(mx, given.dtype) if given.dtype else None


def lanes(given: argparse.Namespace, target: Any) -> dict[str, Callable[[], Any]]:
    """What drafts, by name; lookup starts anew at every prompt."""
    made: dict[str, Callable[[], Any]] = {"baseline": lambda: None, "lookup": LookupDrafter}
    if given.drafter:
        drafter = load_drafter(given.drafter, target, bits=given.bits, lookup_drafts=False)
        made[drafter.name] = lambda: drafter
    return made


def check(given: argparse.Namespace) -> int:
    """Compare every lane's ids with the baseline's."""
    target, tokenizer = load_target(given.model, dtype=dtype_of(given), exact=True)
    if target.exact_refusal:
        sys.exit(f"[exact] {target.exact_refusal} is not row by row here.")
    made = lanes(given, target)
    part, parts = (int(n) for n in given.part.split("/"))
    same = total = n_tokens = 0
    lengths: dict[str, list[float]] = {}
    for text in prompts(given.prompts)[part - 1 :: parts]:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        found = {}
        for name, make in made.items():
            found[name], meter = decode(Pair(target, make(), tokenizer), ids, given.tokens)
            lengths.setdefault(name, []).append(meter.result().acceptance_length)
        equal = all(tokens == found["baseline"] for tokens in found.values())
        same, total, n_tokens = same + equal, total + 1, n_tokens + len(found["baseline"])
        if not equal:
            print(f"DIFFERENT: {text!r}", flush=True)
        print(f"{same} of {total}, {n_tokens} tokens", file=sys.stderr, flush=True)
    shown = ", ".join(f"{name} {statistics.mean(of):.2f}" for name, of in lengths.items())
    print(f"{same} of {total} prompts identical, {n_tokens} tokens; tokens a round: {shown}")
    return 0 if same == total else 1


def price(given: argparse.Namespace) -> int:
    """Tokens per second in exact mode over those without it, by lane; medians over prompts."""
    ratios: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    exact, tokenizer = load_target(given.model, dtype=dtype_of(given), exact=True)
    free, _ = load_target(given.model, dtype=dtype_of(given), verdicts=kernel_verdicts())
    arms = {"exact": (exact, lanes(given, exact)), "free": (free, lanes(given, free))}
    for n, text in enumerate(["Hello."] * 2 + prompts(given.prompts)):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        for lane in arms["free"][1]:
            rate = {}
            for arm in sorted(arms, reverse=n % 2 == 0):  # the second one may profit from the first
                target, made = arms[arm]
                pair = Pair(target, made[lane](), tokenizer)
                rate[arm] = decode(pair, ids, given.tokens)[1].result().tokens_per_second
            if n >= 2:  # the first two only compile
                ratios.setdefault(lane, []).append(rate["exact"] / rate["free"])
                speeds.setdefault(lane, []).append(rate["free"])
    for lane, found in ratios.items():
        print(
            f"{lane:10} exact {statistics.median(found):.3f} of the speed without it "
            f"({statistics.median(speeds[lane]):.0f} tokens/s, {len(found)} prompts)"
        )
    return 0


def main() -> int:
    """The command line."""
    prepare_mlx()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", help="folder of a drafter's weights")
    parser.add_argument("--bits", type=int, default=16, help="of the drafter")
    parser.add_argument("--dtype", help="to compute in; the checkpoint's own without")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--price", action="store_true")
    given = parser.parse_args()
    print(f"{mx.default_device()}, mlx {version('mlx')}, {given.model}", flush=True)
    return price(given) if given.price else check(given)


if __name__ == "__main__":
    sys.exit(main())
