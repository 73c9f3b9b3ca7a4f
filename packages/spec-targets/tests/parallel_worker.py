"""One rank of the split-model tests: `parallel_worker.py FOLDER`, started by mlx.launch.

Rank 0 decodes plainly and with drafts that are often wrong; every rank prints what it committed.
"""

import json
import sys

import mlx.core as mx

from spec_core import Pair, generate
from spec_core.testing import ScriptedDrafter
from spec_targets import load_target
from spec_targets.parallel import follow, lead

PROMPT = [3, 14, 15, 9, 26, 5, 35]


def tell(report: dict) -> None:
    sys.stdout.write(json.dumps(report) + "\n")


def main() -> None:
    group = mx.distributed.init()
    target, _ = load_target(sys.argv[1], group=group)
    entry = target.make_cache()
    target.prefill(PROMPT, entry)
    report = {"rank": group.rank(), "size": group.size(), "bytes": entry.nbytes}
    if group.rank() != 0:
        done = follow(target, group)
        tell({**report, "rows": list(done.rows.values())})
        return
    with lead(target, group) as whole:
        plain = [t for r in generate(Pair(whole), PROMPT, max_tokens=30) for t in r.tokens]
        drafter = ScriptedDrafter(plain, len(PROMPT), 61, wrong_at=(2, 5), taps=(0, 1))
        rounds = list(generate(Pair(whole, drafter), PROMPT, max_tokens=30))
    drafted = [t for r in rounds for t in r.tokens]
    accepted = sum(r.n_accepted for r in rounds)
    answers = {"plain": plain, "drafted": drafted, "accepted": accepted}
    tell({**report, **answers})


if __name__ == "__main__":
    main()
