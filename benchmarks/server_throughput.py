"""Tokens per second of a server at several concurrencies, and the first token of a second turn.

    uv run benchmarks/server_throughput.py --model FOLDER [--concurrency 1,4,8] [--tokens 64]

Each concurrency N sends N different greedy requests at once, three times, and takes the median of
tokens per second over all of them; "serial" sends the same requests one after another. With and
without speculation the texts must be equal.
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from importlib.metadata import version

import httpx
import mlx.core as mx

from spec_core import FixedCap, Pair
from spec_drafters import LookupDrafter
from spec_server import Served, Server, Settings
from spec_targets import load_target

TOPICS = ("rivers", "bridges", "bread", "comets", "wool", "tides", "clocks", "maps")


def loader(folder: str, drafts: bool):
    """What the server loads."""

    def load() -> Served:
        target, tokenizer = load_target(folder)
        drafter = LookupDrafter() if drafts else None
        mode = "lookup" if drafts else "baseline"
        pair = Pair(target, drafter, tokenizer)
        return Served(pair, "model", mode, lambda wish: FixedCap(8 if wish is None else wish))

    return load


def body(topic: str, tokens: int) -> dict:
    """One request: a text to list twice, so that there is something to copy."""
    text = f"List six words about {topic}. Then repeat the same list, word for word, three times."
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "temperature": 0, "max_tokens": tokens}


async def send(url: str, bodies: list[dict], at_once: bool) -> tuple[float, list[str], int]:
    """Seconds, texts and tokens of a set of requests."""
    async with httpx.AsyncClient(base_url=url, timeout=1800) as client:
        start = time.perf_counter()
        if at_once:
            calls = (client.post("/v1/chat/completions", json=b) for b in bodies)
            answers = await asyncio.gather(*calls)
        else:
            answers = [await client.post("/v1/chat/completions", json=b) for b in bodies]
        seconds = time.perf_counter() - start
    found = [answer.json() for answer in answers]
    texts = [one["choices"][0]["message"]["content"] for one in found]
    return seconds, texts, sum(one["usage"]["completion_tokens"] for one in found)


def measure(folder: str, drafts: bool, widths: list[int], tokens: int, trials: int) -> list[dict]:
    """Rows of the table for one mode."""
    rows = []
    settings = Settings(port=0, max_batch=max(widths), prefix_bytes=0)
    with Server(loader(folder, drafts), settings) as server:
        asyncio.run(send(server.url, [body(TOPICS[0], 4)], True))
        for width in widths:
            bodies = [body(TOPICS[i % len(TOPICS)], tokens) for i in range(width)]
            for name, at_once in (("serial", False), ("together", True)):
                if width == 1 and not at_once:
                    continue
                rates, texts = [], []
                for _ in range(trials):
                    seconds, texts, n = asyncio.run(send(server.url, bodies, at_once))
                    rates.append(n / seconds)
                rows.append(
                    {
                        "mode": "lookup" if drafts else "baseline",
                        "concurrency": width,
                        "sent": name,
                        "tokens_per_second": round(statistics.median(rates), 2),
                        "trials": [round(rate, 2) for rate in rates],
                        "texts": texts,
                    }
                )
    return rows


def second_turn(folder: str, n_prompt: int) -> dict:
    """Seconds to the first token of a conversation's second turn, cold and from kept states."""
    ids = [20 + i * i % 300 for i in range(n_prompt)]
    follow = [*ids, 21, 22, 23, 24, 25]
    request = {"model": "m", "max_tokens": 8, "temperature": 0}
    result = {}
    for name, budget in (("cold", 0), ("warm", 2**30)):
        with Server(loader(folder, True), Settings(port=0, prefix_bytes=budget)) as server:
            url = f"{server.url}/v1/completions"
            httpx.post(url, json={**request, "prompt": ids}, timeout=1800)
            answer = httpx.post(url, json={**request, "prompt": follow}, timeout=1800).json()
            result[name] = answer["x_spec"]["time_to_first_token"]
            result[f"{name}_text"] = answer["choices"][0]["text"]
            result[f"{name}_cached"] = answer["x_spec"]["cached_tokens"]
    result["identical"] = result.pop("cold_text") == result.pop("warm_text")
    result["times_lower"] = round(result["cold"] / result["warm"], 1)
    return result


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=2000)
    given = parser.parse_args()
    widths = [int(n) for n in given.concurrency.split(",")]
    rows = []
    for drafts in (False, True):
        rows += measure(given.model, drafts, widths, given.tokens, given.trials)
    texts: dict = {}
    for row in rows:
        own = row.pop("texts")
        same = texts.setdefault(row["concurrency"], own)
        row["identical"] = own == same
    report = {
        "machine": f"{platform.machine()} {mx.default_device()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "mlx-spec-server")},
        "tokens": given.tokens,
        "rows": rows,
        "second_turn": second_turn(given.model, given.turn_tokens),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
