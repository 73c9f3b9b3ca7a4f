"""Greedy identity on a real model: baseline, lookup and mlx-lm must give the same token ids.

    uv run benchmarks/identity.py --prompts 20 --tokens 200

Prints one line a prompt and the count at the end; exits 1 when any prompt differs.
"""

import argparse
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

from spec_cli import opening
from spec_core import FixedCap, Pair, StatsMeter, generate
from spec_drafters import LookupDrafter
from spec_targets import load_target

PROMPTS = Path(opening.__file__).parent / "prompts.jsonl"


def pick(n: int) -> list[dict]:
    """The first prompts of every task in turn, so that any count is varied."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["id"].rsplit("-", 1)[1])[:n]


def ours(pair: Pair, ids: list[int], n: int) -> tuple[list[int], float]:
    """Our ids, up to and with the end token, and the acceptance length."""
    meter, tokens = StatsMeter(), []
    for round_ in generate(pair, ids, max_tokens=n, cap=FixedCap(32)):
        meter.add(round_)
        tokens += round_.tokens
    return tokens, meter.result().acceptance_length


def theirs(model, stop_ids: frozenset[int], ids: list[int], n: int) -> list[int]:
    """Ids of mlx-lm's own greedy loop, up to and with the end token."""
    tokens = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=n):
        tokens.append(token)
        if token in stop_ids or len(tokens) == n:
            break
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; the embedded default without")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    name, folder = opening.locate_model(arguments.model)
    target, tokenizer = load_target(folder)
    same = total = 0
    for row in pick(arguments.prompts):
        ids = tokenizer.encode_chat([{"role": "user", "content": row["prompt"]}])
        baseline, _ = ours(Pair(target, None, tokenizer), ids, arguments.tokens)
        lookup, length = ours(Pair(target, LookupDrafter(), tokenizer), ids, arguments.tokens)
        reference = theirs(target.model, tokenizer.stop_ids, ids, arguments.tokens)
        equal = baseline == lookup == reference
        same, total = same + equal, total + 1
        verdict = "identical" if equal else "DIFFERENT"
        print(
            f"{row['id']:8} {len(baseline):4} tokens  {length:5.2f} a round  {verdict}", flush=True
        )
    print(f"{same} of {total} prompts identical: baseline = lookup = mlx-lm, {name}, greedy")
    return 0 if same == total else 1


if __name__ == "__main__":
    sys.exit(main())
