"""`spec serve` as a process of its own."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from spec_cli.commands import serve
from spec_server import Settings

RUN = [sys.executable, "-c", "from spec_cli.entry import main; main()", "serve"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def call(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def started(tiny_folder, tmp_path):
    """Start a server; returns its port and process."""
    children = []

    def start(*arguments):
        port = free_port()
        environment = {**os.environ, "SPEC_CACHE_DIR": str(tmp_path / "cache")}
        child = subprocess.Popen(
            [*RUN, "--model", str(tiny_folder), "--port", str(port), *arguments],
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        children.append(child)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if call(port, "/health")["status"] == "ok":
                    return port, child
            except OSError:
                assert child.poll() is None, child.stderr.read()
                time.sleep(0.1)
        raise AssertionError("the server did not come up")

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stderr.close()


def test_it_serves_until_it_is_told_to_end(started):
    port, child = started("--mode", "lookup", "--max-draft", "3")
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    answer = call(port, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 8 and answer["x_spec"]["mode"] == "lookup"
    health = call(port, "/health")
    assert health["batching"] == "on" and health["context_length"] == 256
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) in (0, -signal.SIGTERM)
    said = child.stderr.read()
    assert f"(lookup) on http://127.0.0.1:{port}" in said and "Traceback" not in said
    assert "Drafts: max-draft 3." in said  # pinned, so no calibration is in use


def test_states_on_disk_outlive_the_process(started):
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi there"}]}
    cached = []
    for _ in range(2):
        port, child = started("--mode", "lookup", "--max-draft", "3", "--prefix-cache-disk")
        answer = call(port, "/v1/chat/completions", body)
        cached.append(answer["x_spec"]["cached_tokens"])
        time.sleep(0.5)  # idle, so that it writes
        child.kill()
        child.wait()
    assert cached[0] == 0 and cached[1] > 10


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "/no/such/folder"), 1, "/no/such/folder"),
        (("--port", "99999"), 2, "99999"),
        (("--max-batch", "0"), 2, "max-batch"),
        (("--mode", "turbo"), 2, "turbo"),
        (("--api-key", ""), 2, "The API key must hold at least one character"),
        (("--allowed-host", ""), 2, "An allowed host must be a name without scheme and port"),
        (("--allowed-host", "http://a"), 2, 'got "http://a"'),
        (("--allowed-host", "a:8080"), 2, 'got "a:8080"'),
        (("--cors-origin", "localhost"), 2, "must be like http://localhost:3000"),
        (("--cors-origin", "http://a/"), 2, 'got "http://a/"'),
        (("--host", "999.1.1.1"), 1, 'must be an address of this machine, got "999.1.1.1"'),
        (("--host", "192.0.2.7"), 1, "0.0.0.0 for all that reach it"),
    ],
)
def test_bad_input_ends_in_a_short_message(spec, arguments, code, message):
    got, out, err = spec("serve", *arguments)
    assert (got, out) == (code, "") and message in err


def test_an_empty_key_in_the_environment_is_refused_too(spec, monkeypatch):
    monkeypatch.setenv("SPEC_API_KEY", "")
    got, out, err = spec("serve", "--model", "/no/such/folder")
    assert (got, out) == (2, "") and "The API key must hold at least one character" in err


def test_a_port_in_use_is_refused(spec, tiny_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = spec("serve", "--model", tiny_folder, "--mode", "lookup", "--port", port)
    assert code == 1 and f"Port {port}" in err and "0 takes any free one" in err


def test_hosts_and_origins_that_work_are_taken():
    Settings(
        allowed_hosts=("*", "::1", "host.docker.internal", "10.0.0.1"),
        cors_origins=("*", "null", "http://localhost:3000", "https://a.example", "http://[::1]:1"),
    )


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((256, resource.RLIM_INFINITY), 10_240),
        ((1024, 4096), 4096),
        ((20_000, 20_000), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_it_may_hold_many_connections(monkeypatch, limits, wanted):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: asked.append(pair))
    serve._raise_file_limit()
    assert asked == ([] if wanted is None else [(wanted, limits[1])])
