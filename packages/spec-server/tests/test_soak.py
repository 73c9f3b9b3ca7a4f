"""A thousand random requests, with bad bodies, disconnects and cancellations among them."""

import gc
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from spec_server import Server, Settings

CHAT = "/v1/chat/completions"
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


class Echo:
    """Scripts on demand: `say:N;` answers with the marker of request N, some words, the marker."""

    def get(self, key, default=""):
        if not key.isdecimal():
            return default
        rng = random.Random(int(key))
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 30)))
        return f"[m{key}] {words} [m{key}]"


@pytest.fixture
def echo(load_script):
    settings = Settings(port=0, max_batch=6, max_queue=500, prefix_bytes=4_000_000)
    with Server(load_script(Echo()), settings) as running:
        yield running


@pytest.fixture
def tiny(load_tiny):
    limits = {"max_batch": 6, "max_queue": 500, "prefix_bytes": 4_000_000}
    settings = Settings(port=0, prefill_chunk=32, **limits)
    with Server(load_tiny(), settings) as running:
        yield running


def body_of(rng, i):
    """One random request that is fine."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{' '.join(rng.choices(WORDS, k=9))} say:{i};"}],
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0, 0.7]),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
    if rng.random() < 0.2:
        body |= {"stop": [rng.choice(WORDS)]}
    if rng.random() < 0.2:
        body |= {"n": 2}
    if rng.random() < 0.3:
        body |= {"x_spec": {"max_draft": rng.randrange(5)}}
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.1}
    return body


def leave(server, body, rng):
    """Send a request and close the connection at some point."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(message[: rng.randrange(1, len(message))] if rng.random() < 0.3 else message)
        if rng.random() < 0.6:
            sock.settimeout(0.05)
            try:
                sock.recv(rng.randrange(1, 400))
            except TimeoutError:
                pass


def one_request(server, client, i, check):
    rng = random.Random(i)
    kind = rng.random()
    body = body_of(rng, i)
    if kind < 0.15:
        leave(server, body, rng)
        return "left"
    if kind < 0.3:
        bad = rng.choice([b"{", b"[]", b'{"model": 1}', json.dumps({**body, "zz": 1}).encode(),
                          json.dumps({**body, "top_p": 7}).encode()])  # fmt: skip
        headers = {"content-type": "application/json"}
        answer = client.post(f"{server.url}{CHAT}", content=bad, headers=headers)
        assert answer.status_code == 400
        return "bad"
    answer = client.post(f"{server.url}{CHAT}", json=body)
    assert answer.status_code == 200, answer.text
    check(i, answer.text)
    return "good"


def own_marker_only(i, text):
    found = set(re.findall(r"\[m(\d+)\]", text))
    assert found <= {str(i)}, f"request {i} was answered with {found}"


def resident_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run(server, numbers, check):
    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda i: one_request(server, client, i, check), numbers))


def settled(server):
    end = time.monotonic() + 20
    while server.engine.n_running + server.engine.n_waiting:
        assert time.monotonic() < end, "a row is stuck"
        time.sleep(0.02)
    assert server.engine._batch.rows == []


def test_a_hundred_random_requests_never_cross(echo):
    kinds = run(echo, range(100), own_marker_only)
    settled(echo)
    assert {"good", "bad", "left"} == set(kinds)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's memory figures")
def test_a_thousand_random_requests_leave_nothing_behind(tiny, echo):
    for server, check in ((tiny, lambda i, text: None), (echo, own_marker_only)):
        run(server, range(1500), check)  # the first ones fill caches and pools
        settled(server)
        before = resident_bytes()
        kinds = run(server, range(2000, 3000), check)
        settled(server)
        after = resident_bytes()
        assert len(kinds) == 1000 and kinds.count("good") > 500
        assert after < 1.02 * before, f"{before} -> {after} bytes"
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert threading.active_count() < 40
