"""What does rolling a block back cost? Rounds that reject against rounds that keep everything.

    uv run benchmarks/rollback.py --out docs/benchmarks

Tiny random models of real depth: 64 layers, 48 of them recurrent. A round is verify, commit and
evaluation of logits and state, as in decoding. Both kinds of round alternate; the share is the
median over neighbouring pairs.
"""

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from spec_targets import MlxTarget
from spec_targets.families import FAMILIES
from spec_targets.tiny import tiny_model

# On a machine that others use, processor time repeats where wall time does not.
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_DEEP = {"num_hidden_layers": 64, "full_attention_interval": 4}
_MAMBA = ["M", "-", "M", "-", "M", "-", "*", "-"]
MODELS = {  # model type -> config fields; each has 48 recurrent layers
    "qwen3_5": _DEEP,
    "qwen3_next": {**_DEEP, "mlp_only_layers": []},
    "nemotron_h": {"hybrid_override_pattern": _MAMBA * 16},
    "lfm2": {
        "num_hidden_layers": 64,
        "layer_types": (["conv"] * 3 + ["full_attention"]) * 16,
    },
}
_WIDE = {  # the widths of real models, for a GPU
    "qwen3_5": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 32000,
    },
    "nemotron_h": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "vocab_size": 32000,
    },
}


def one_round(target: MlxTarget, cache, block: mx.array, n_keep: int, clock) -> float:
    """Seconds of a verify that keeps `n_keep` rows, until logits and state are there."""
    start = clock()
    output = target.verify(block, cache)
    mx.eval(output.logits)
    target.commit(cache, n_keep)
    mx.eval([entry.state for entry in cache.entries])
    return clock() - start


def measure(model_type: str, n_rows: int, n_keep: int, trials: int, clock, wide: bool) -> dict:
    """Median seconds of both kinds of round, and the median share that rolling back adds."""
    fields = {**MODELS[model_type], **(_WIDE[model_type] if wide else {})}
    model = tiny_model(model_type, mx.bfloat16 if wide else mx.float32, **fields)
    target = MlxTarget(model, FAMILIES[model_type], model_type)
    cache = target.make_cache()
    target.prefill(list(range(1, 40)), cache)
    block = mx.arange(n_rows)
    seconds: dict[int, list[float]] = {n_keep: [], n_rows: []}
    for trial in range(trials + 2):  # two warm-ups
        for kept in (n_keep, n_rows) if trial % 2 else (n_rows, n_keep):
            elapsed = one_round(target, cache, block, kept, clock)
            if trial >= 2:
                seconds[kept].append(elapsed)
    kept, whole = (statistics.median(seconds[n]) for n in (n_keep, n_rows))
    ratios = [a / b for a, b in zip(seconds[n_keep], seconds[n_rows], strict=True)]
    return {
        "model_type": model_type,
        "recurrent_layers": 48,
        "hidden_size": target.hidden_size,
        "rows": n_rows,
        "kept": n_keep,
        "round_ms": 1e3 * whole,
        "round_with_rollback_ms": 1e3 * kept,
        "rollback_share": statistics.median(ratios) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--wide", action="store_true", help="real widths, bfloat16; for a GPU")
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--clock", choices=list(_CLOCKS), default="wall")
    parser.add_argument("--out", type=Path, help="write rollback.json and rollback.md here")
    arguments = parser.parse_args()
    results = []
    clock, wide = _CLOCKS[arguments.clock], arguments.wide
    for model_type in arguments.models or (_WIDE if wide else MODELS):
        result = measure(model_type, arguments.rows, arguments.keep, arguments.trials, clock, wide)
        results.append(result)
        print(
            f"{model_type}: a round of {result['rows']} rows {result['round_ms']:.1f} ms, keeping "
            f"{result['kept']} {result['round_with_rollback_ms']:.1f} ms, "
            f"rollback {100 * result['rollback_share']:+.1f}%",
            flush=True,
        )
    if arguments.out:
        write(arguments.out, arguments, results)


def write(folder: Path, arguments: argparse.Namespace, results: list[dict]) -> None:
    """rollback.json and rollback.md, stamped with machine, versions, command and date."""
    name = "rollback-wide" if arguments.wide else "rollback"
    stamp = {
        "machine": f"{device()}",
        "versions": {name: number(name) for name in ("mlx", "mlx-lm", "spec-targets")},
        "command": f"uv run benchmarks/rollback.py --rows {arguments.rows} "
        f"--keep {arguments.keep} --trials {arguments.trials} --clock {arguments.clock}"
        f"{' --wide' if arguments.wide else ''}",
        "date": time.strftime("%Y-%m-%d"),
        "clock": f"{arguments.clock} time",
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps({**stamp, "rows": results}, indent=2)
    (folder / f"{name}.json").write_text(data + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in stamp["versions"].items())
    lines = [
        "# What rolling a block back costs",
        "",
        "Random models of the real classes, 48 recurrent layers. A round is verify, commit",
        "and evaluation of logits and state; rounds that keep part of the block alternate with",
        "rounds that keep all of it, and the share is the median over neighbouring pairs.",
        "",
        "| model type | hidden | rows | kept | whole block, ms | with rollback, ms | rollback |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {r['model_type']} | {r['hidden_size']} | {r['rows']} | {r['kept']} "
            f"| {r['round_ms']:.1f} | {r['round_with_rollback_ms']:.1f} "
            f"| {100 * r['rollback_share']:+.1f}% |"
            for r in results
        ),
        "",
        f"{stamp['date']}, {stamp['machine']}, {stamp['clock']}; {versions}.",
        "",
        f"    {stamp['command']} --out docs/benchmarks",
    ]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def number(distribution: str) -> str:
    """Its version, or that it runs from a source tree."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "source"


def device() -> str:
    """What the numbers were taken on."""
    if mx.default_device() == mx.gpu:
        return f"{mx.device_info()['device_name']}, MLX on {mx.default_device()}"
    return f"{processor()}, {os.cpu_count()} cores, MLX on {mx.default_device()}"


def processor() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
