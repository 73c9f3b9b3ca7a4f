"""What clients are told when the server ends before they have their answer."""

import json
import logging
import socket
import threading
import time

import httpx
import pytest

from spec_server import Server, Settings, gate
from spec_server import server as server_module

TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900}
ENDLESS = {**TALK, "x_spec": {"max_draft": 0}}


class Slow:
    """A target that takes its time."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        time.sleep(0.01)
        return getattr(self._target, name)


@pytest.fixture
def ending(load_tiny, monkeypatch, caplog):
    """A slow server that waits half a second for those it serves."""
    monkeypatch.setattr(server_module, "_DRAIN_S", 0.5)
    caplog.set_level(logging.INFO, logger="uvicorn.error")
    running = Server(load_tiny(wrap=Slow), Settings(port=0))
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_ends_with_an_error_and_a_whole_answer_is_refused(ending, route, caplog):
    told = {}

    def read(stream):
        body = {**ENDLESS, "stream": stream}
        answer = httpx.post(f"{ending.url}{route}", json=body, timeout=60)
        told[stream] = answer.status_code, answer.text

    threads = [threading.Thread(target=read, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while ending.engine.n_running < 2:
        time.sleep(0.01)
    ending.stop()
    for thread in threads:
        thread.join()
    assert (
        told[False][0] == 503 and "shutting down" in json.loads(told[False][1])["error"]["message"]
    )
    last = told[True][1].rstrip().rsplit("data: ", 1)[1]
    assert told[True][0] == 200 and "shutting down" in json.loads(last)["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_that_stops_is_given_up_and_one_that_is_slow_is_not(load_tiny, monkeypatch):
    monkeypatch.setattr(gate, "_SILENCE_S", 0.5)
    body = json.dumps({**TALK, "max_tokens": 2}).encode()

    def answer(line, pieces):
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode())
        for piece in pieces:
            line.sendall(piece)
            time.sleep(0.2)
        return line.recv(10_000)

    with Server(load_tiny(), Settings(port=0)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            told = answer(line, [body[:5]])
            while more := line.recv(1000):  # until the connection is closed
                told += more
            assert told.startswith(b"HTTP/1.1 408 ") and b"must go on within 0.5 s" in told
        with socket.create_connection((host, int(port)), timeout=10) as line:
            assert answer(line, [body[i : i + 20] for i in range(0, len(body), 20)]).startswith(
                b"HTTP/1.1 200 "
            )


@pytest.mark.parametrize("sent", [b"", b"POST /v1/mess", b"POST / HTTP/1.1\r\nHost: x\r\n"])
def test_connections_without_a_request_keep_nobody_waiting(ending, sent):
    host, port = ending.url.removeprefix("http://").split(":")
    lines = [socket.create_connection((host, int(port))) for _ in range(200)]
    for line in lines:
        line.sendall(sent)
    answer = httpx.post(f"{ending.url}/v1/chat/completions", json={**TALK, "max_tokens": 1})
    assert answer.status_code == 200
    since = time.perf_counter()
    ending.stop()
    assert time.perf_counter() - since < 3
    for line in lines:
        line.close()


def test_half_a_request_is_answered_too(ending, caplog):
    host, port = ending.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        head = f"POST /v1/messages HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        time.sleep(0.2)
        ending.stop()
        line.settimeout(10)
        assert line.recv(1000).startswith(b"HTTP/1.1 503 ")
    assert not [record for record in caplog.records if record.exc_info]
