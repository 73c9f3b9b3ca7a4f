"""Tokens per second of a server: requests one after another against together, drafting or not.

    python3 benchmarks/server_throughput.py --model FOLDER [--drafter FOLDER] [--write FILE.md]

One model is loaded, and served once per mode: "baseline", "lookup", and with --drafter the
drafter's own. A request is a raw text answered greedily with exactly --tokens tokens; half of the
texts ask for copies, half do not. In every trial each mode answers the requests one by one, then
those of 4 clients, then of 8, who send two each, the second when the first is answered; modes take
turns, in another order each trial. "Serial" at concurrency N is the first N of the lone requests.
Shown are medians, the gain over serial, and the paired gain over the baseline at the same
concurrency. Each text is held against the baseline's serial one: where two logits tie within
rounding, a forward of another shape may choose the other token.

Needs mlx, mlx-lm, fastapi, uvicorn, prometheus-client, llguidance and platformdirs, nothing else
beside the packages of this repository; run it with their `src` folders on PYTHONPATH or installed.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.request import Request, urlopen

import mlx.core as mx

from spec_calibrate.controller import CapController
from spec_calibrate.measure import measure
from spec_cli.env import kernel_verdicts, prepare_mlx
from spec_core import FixedCap, Pair
from spec_drafters import LookupDrafter, load_drafter
from spec_server import Served, Server, Settings
from spec_targets import load_target

TOPICS = ("rivers", "bridges", "bread", "comets", "wool", "tides", "clocks", "maps")
COPY = (
    "Here is a list about {0}: the first of the {0}, the second of the {0}, the third of the {0}, "
    "the last of the {0}. Word for word, again: the first of the {0}, the second of the {0}, the "
    "third of"
)
OPEN = "An essay about {0}, written for people who have never thought about {0} before.\n\n"
WAIT_S = 1800


def say(text: str) -> None:
    """Progress, at once."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One model, served once per mode.

    Args:
        given: The command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.widths = sorted({1, *(int(n) for n in given.concurrency.split(","))})
        self.servers: dict[str, Server] = {}
        self.target = self.tokenizer = None
        self.calibration: dict[str, dict] = {}

    def open(self) -> None:
        """Load, calibrate and serve."""
        modes = ["baseline", "lookup", *(["drafter"] if self.given.drafter else [])]
        for mode in modes:
            start = time.perf_counter()
            settings = Settings(
                port=0, max_batch=max(self.widths), prefix_bytes=self.given.prefix_bytes
            )
            server = Server(lambda mode=mode: self.load(mode), settings)
            server.start()
            served, refusal = server.engine.served, server.engine.batch_refusal
            assert served is not None  # it has started
            self.servers[served.mode] = server
            say(f"{served.mode}: {time.perf_counter() - start:.1f} s to load"
                + (f"; requests take turns: {refusal}" if refusal else ""))  # fmt: skip

    def load(self, mode: str) -> Served:
        """What one server serves; the target is the same for all."""
        if self.target is None:
            self.target, self.tokenizer = load_target(self.given.model, verdicts=kernel_verdicts())
            self.tokenizer.stop_ids = frozenset()  # every answer has the same length
        drafter = None
        if mode == "lookup":
            drafter = LookupDrafter()
        elif mode == "drafter":
            drafter = load_drafter(self.given.drafter, self.target, bits=self.given.drafter_bits)
        pair = Pair(self.target, drafter, self.tokenizer)
        if drafter is None:
            return Served(pair, "model", "baseline", lambda wish: FixedCap(0))
        curves = measure(pair, budget_s=self.given.calibrate)
        cap = CapController(curves)
        self.calibration[drafter.name] = curves.to_dict()
        return Served(
            pair, "model", drafter.name, lambda wish: cap if wish is None else FixedCap(wish)
        )

    def bodies(self, n: int) -> list[dict]:
        """So many requests, the same ones every time."""
        found = []
        for i in range(n):
            topic, form = TOPICS[i % len(TOPICS)], (COPY, OPEN)[i % 2]
            text = form.format(topic if i < len(TOPICS) else f"{topic} {i // len(TOPICS)}")
            found.append(
                {"model": "m", "prompt": text, "temperature": 0, "max_tokens": self.given.tokens}
            )
        return found

    def clients(self, url: str, width: int) -> tuple[list["Answer"], float]:
        """What so many clients are answered, who send two requests each, and the seconds."""
        with ThreadPoolExecutor(width) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda body: post(url, body), self.bodies(2 * width)))
            return answers, time.perf_counter() - start

    def trial(self, mode: str) -> dict:
        """One mode through all concurrencies: seconds, texts and acceptance."""
        url = f"{self.servers[mode].url}/v1/completions"
        n_alone = self.given.serial or max(self.widths)
        alone = [post(url, body) for body in self.bodies(n_alone)]
        found: dict = {"alone": [(a.seconds, a.n, a.text, a.length) for a in alone]}
        for width in self.widths[1:]:
            together, seconds = self.clients(url, width)
            texts = [a.text for a in together]
            lengths = [a.length for a in together]
            found[width] = (seconds, sum(a.n for a in together), texts, lengths)
        return found

    def run(self) -> tuple[dict, list[dict]]:
        """Trials by mode until the time is used up, and remarks."""
        rng, began = random.Random(0), time.perf_counter()
        modes = list(self.servers)
        trials: dict[str, list[dict]] = {mode: [] for mode in modes}
        for mode in modes:
            self.warm_up(mode)
        say(f"warm after {time.perf_counter() - began:.1f} s")
        while len(trials[modes[0]]) < self.given.trials:
            for mode in rng.sample(modes, len(modes)):
                start = time.perf_counter()
                trials[mode].append(self.trial(mode))
                say(f"trial {len(trials[mode])}, {mode}: {time.perf_counter() - start:.1f} s")
            spent = time.perf_counter() - began
            n = len(trials[modes[0]])
            if n >= 2 and spent + spent / n > self.given.budget:
                break
        return trials, rows_of(trials, self.widths)

    def warm_up(self, mode: str) -> None:
        """Compile what the widths need, and let the server learn what its rounds cost."""
        url = f"{self.servers[mode].url}/v1/completions"
        for width in self.widths:
            self.clients(url, width)

    def close(self) -> None:
        """Stop all servers, and let the weights go while the interpreter still runs."""
        for server in self.servers.values():
            server.stop()
        self.servers, self.target, self.tokenizer = {}, None, None
        gc.collect()


class Answer:
    """One answer, timed by its client."""

    def __init__(self, seconds: float, body: dict) -> None:
        self.seconds = seconds
        self.text = body["choices"][0]["text"]
        self.n = body["usage"]["completion_tokens"]
        self.length = body["x_spec"]["acceptance_length"]


def post(url: str, body: dict) -> Answer:
    """Send one request and wait for its answer."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.perf_counter()
    with urlopen(request, timeout=WAIT_S) as answer:
        read = json.load(answer)
    return Answer(time.perf_counter() - start, read)


def rows_of(trials: dict[str, list[dict]], widths: list[int]) -> list[dict]:
    """The table: a row per mode, concurrency and way of sending."""
    reference = [one[2] for one in trials["baseline"][0]["alone"]]
    speeds: dict[tuple, list[float]] = {}
    rows: list[dict] = []
    for mode, found in trials.items():
        for width in widths:
            for sent in ("serial", "together") if width > 1 else ("serial",):
                rates, texts, lengths = [], [], []
                for trial in found:
                    alone = trial["alone"][:width]
                    if sent == "serial":
                        share = sum(n for _, n, _, _ in alone) / sum(s for s, _, _, _ in alone)
                        texts += list(enumerate(text for _, _, text, _ in alone))
                        lengths += [one[3] for one in alone]
                    else:
                        share = trial[width][1] / trial[width][0]
                        texts += list(enumerate(trial[width][2]))
                        lengths += trial[width][3]
                    rates.append(share)
                speeds[mode, width, sent] = rates
                pairs = [(i, text) for i, text in texts if i < len(reference)]
                rows.append(
                    {
                        "mode": mode,
                        "concurrency": width,
                        "sent": sent,
                        "tokens_per_second": round(statistics.median(rates), 2),
                        "trials": [round(rate, 2) for rate in rates],
                        "acceptance_length": round(statistics.mean(lengths), 3),
                        "over_serial": gain(rates, speeds[mode, width, "serial"]),
                        "over_baseline": gain(rates, speeds["baseline", width, sent]),
                        "texts": len(pairs),
                        "identical": sum(text == reference[i] for i, text in pairs),
                    }
                )
    return rows


def gain(rates: list[float], others: list[float]) -> float:
    """Median of paired ratios."""
    return round(statistics.median(a / b for a, b in zip(rates, others, strict=True)), 3)


def second_turn(bench: Bench, n_prompt: int) -> dict:
    """Seconds to the first token of a conversation's second turn, cold and from kept states."""
    assert bench.target is not None  # the trials ran on it
    n_ids = min(bench.target.vocab_size, 300)
    ids = [i * i % (n_ids - 20) + 20 for i in range(n_prompt)]
    request = {"model": "m", "max_tokens": 8, "temperature": 0}
    result: dict = {"prompt_tokens": n_prompt}
    for name, budget in (("cold", 0), ("warm", 2**32)):
        settings = Settings(port=0, prefix_bytes=budget)
        with Server(lambda: bench.load("baseline"), settings) as server:
            url = f"{server.url}/v1/completions"
            for prompt in (ids, [*ids, 21, 22, 23, 24, 25]):
                body = {**request, "prompt": prompt}
                sent = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
                with urlopen(sent, timeout=WAIT_S) as answer:
                    read = json.load(answer)
            result[f"{name}_s"] = read["x_spec"]["time_to_first_token"]
            result[f"{name}_cached"] = read["x_spec"]["cached_tokens"]
            result[f"{name}_text"] = read["choices"][0]["text"]
    result["identical"] = result.pop("cold_text") == result.pop("warm_text")
    result["times_lower"] = round(result["cold_s"] / max(result["warm_s"], 1e-9), 1)
    return result


def table(report: dict) -> str:
    """The report as markdown."""
    lines = [
        f"`{report['command']}` on {report['machine']}, "
        + ", ".join(f"{name} {v}" for name, v in report["versions"].items())
        + f", {report['date']}: {report['tokens']} tokens per answer, medians of "
        f"{report['n_trials']} trials.",
        "",
        "| mode | concurrency | sent | tokens/s | over serial | over baseline "
        "| acceptance length | same texts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['mode']} | {row['concurrency']} | {row['sent']} | "
            f"{row['tokens_per_second']:.1f} | {row['over_serial']:.2f}x | "
            f"{row['over_baseline']:.2f}x | {row['acceptance_length']:.2f} | "
            f"{row['identical']} of {row['texts']} |"
        )
    turn = report.get("second_turn")
    if turn:
        lines += [
            "",
            f"First token of a second turn over {turn['prompt_tokens']} tokens: {turn['warm_s']} s "
            f"from kept states ({turn['warm_cached']} tokens), {turn['cold_s']} s without; "
            f"{'same text' if turn['identical'] else 'other text'}.",
        ]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="checkpoint folder; random weights will do")
    parser.add_argument("--drafter", help="folder of a drafter for it")
    parser.add_argument("--drafter-bits", type=int, default=4, choices=(4, 8, 16))
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    parser.add_argument("--trials", type=int, default=5, help="at most; two are always made")
    parser.add_argument("--budget", type=float, default=75, help="seconds for the trials, about")
    parser.add_argument("--serial", type=int, default=0, help="lone requests a trial; all without")
    parser.add_argument("--calibrate", type=float, default=4, help="seconds per drafter")
    parser.add_argument("--prefix-bytes", type=int, default=0)
    parser.add_argument("--turn-tokens", type=int, default=0, help="measure a second turn as well")
    parser.add_argument("--write", type=Path, help="file for the table; FILE.json beside it")
    return parser.parse_args()


def found_versions() -> dict[str, str]:
    """Versions of what counts, where they are installed as packages."""
    found = {}
    for name in ("mlx", "mlx-lm", "mlx-spec-server"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """The device in words."""
    info = mx.device_info() if mx.default_device() != mx.cpu else {}
    name = info.get("device_name", info.get("architecture", "MLX on the CPU"))
    return f"{platform.machine()} {platform.system()}, {name}"


def main() -> None:
    """Run, print one JSON object, write the table."""
    prepare_mlx()
    given = parse()
    bench = Bench(given)
    try:
        bench.open()
        trials, rows = bench.run()
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "command": "python3 " + " ".join(sys.argv),
            "machine": machine(),
            "versions": found_versions(),
            "model": Path(given.model).name,
            "tokens": given.tokens,
            "n_trials": len(trials["baseline"]),
            "rows": rows,
            "batch_refusal": bench.servers["baseline"].engine.batch_refusal,
            "calibration": bench.calibration,
        }
        if given.turn_tokens:
            report["second_turn"] = second_turn(bench, given.turn_tokens)
    finally:
        bench.close()
    print(json.dumps(report, indent=1), flush=True)
    say(table(report))
    if given.write is not None:
        given.write.write_text(table(report), encoding="utf-8")
        beside = given.write.with_suffix(given.write.suffix + ".json")
        beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
