"""What comes before and around a generation: bodies, hosts, keys, limits, disconnects."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from spec_server import Server, Settings

CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
BODIES = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"model": "m", "prompt": "hi there", "max_tokens": 2},
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 2},
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}


def post(server, route, **kwargs):
    return httpx.post(f"{server.url}{route}", timeout=30, **kwargs)


def message_of(answer):
    body = answer.json()
    return body["error"]["message"]


BROKEN = {
    "empty": b"",
    "cut": b'{"model": "m", ',
    "not an object": b"[1, 2]",
    "a string": b'"hi"',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "deep": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"model": "m", "temperature": NaN}',
    "a lone surrogate": b'{"model": "\\ud800"}',
    "a key twice": b'{"model": "m", "model": "m"}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies_are_told_off_in_the_dialects_shape(server, route, name):
    answer = post(server, route, content=BROKEN[name], headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    if route.startswith("/v1/messages"):
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("route", ROUTES)
def test_a_key_that_occurs_twice_is_named(server, route):
    whole = json.dumps(BODIES[route])
    headers = {"content-type": "application/json"}
    assert post(server, route, content=whole, headers=headers).status_code == 200
    for body in (
        whole[:-1] + ', "model": "other"}',
        whole[:-1] + ', "metadata": {"user_id": "a", "user_id": "b"}}',
    ):
        answer = post(server, route, content=body, headers=headers)
        assert answer.status_code == 400 and "must occur once" in message_of(answer)


@pytest.mark.parametrize("route", ROUTES)
def test_null_counts_as_absent_for_every_optional_field(server, route):
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    name = schema["schema"]["$ref"].rsplit("/", 1)[1]
    described = document["components"]["schemas"][name]
    fields = set(described["properties"]) - set(described["required"]) - BODIES[route].keys()
    assert len(fields) >= 5
    for field in [*sorted(fields), "no_such_field"]:
        answer = post(server, route, json={**BODIES[route], field: None})
        assert answer.status_code == 200, (field, answer.text)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_known_is_refused_by_name(server, route):
    answer = post(server, route, json={**BODIES[route], "frobnicate": 1})
    assert answer.status_code == 400 and '"frobnicate" is not supported' in message_of(answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "10"),
        ("max_completion_tokens", 0), ("temperature", -0.1), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("top_k", "5"),
        ("min_p", 1), ("seed", -1), ("seed", "7"), ("seed", 2**64), ("n", 0), ("n", 1000),
        ("stop", ""), ("stop", [""]), ("stop", 5), ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 1000}), ("logit_bias", {"999999": 1}), ("top_logprobs", 3),
        ("logprobs", 3), ("tool_choice", "required"), ("tool_choice", "auto"),
        ("response_format", {"type": "json_schema"}), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nonsense"}}}),
        ("stream_options", {"include_usage": True}), ("store", True), ("audio", {}),
        ("messages", []), ("messages", [{"role": "robot", "content": "hi"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("reasoning_effort", "high"), ("x_spec", {"max_draft": -1}), ("x_spec", {"y": 1}),
        ("repetition_penalty", 0), ("presence_penalty", 1e9), ("model", 3),
    ],
)  # fmt: skip
def test_values_outside_their_range_are_refused_by_name(server, field, value):
    answer = post(server, CHAT, json={**BODIES[CHAT], field: value})
    assert answer.status_code == 400, answer.text
    assert field in message_of(answer)


@pytest.mark.parametrize("value", [400, 10**9, 2**63 - 1])
def test_large_values_are_bounded(server, value):
    body = {**BODIES[CHAT], "top_k": value, "temperature": 1}
    assert post(server, CHAT, json=body).status_code == 200
    for limit in (10**12, 2**62):
        huge = {**BODIES[CHAT], "max_tokens": limit, "stop": "e"}
        answer = post(server, CHAT, json=huge).json()
        (notice,) = answer["x_spec"]["notices"]
        room = server.engine.served.pair.target.context_length - answer["usage"]["prompt_tokens"]
        assert notice.startswith(f"The context holds {room} tokens after this prompt; the limit of")
    unlimited = {**BODIES[CHAT], "stop": "e"}
    unlimited.pop("max_tokens", None)
    assert "notices" not in post(server, CHAT, json=unlimited).json()["x_spec"]


def test_text_parts_are_joined_and_system_messages_reach_the_prompt(server):
    def tokens(messages):
        body = {"model": "m", "messages": messages, "max_tokens": 1}
        return post(server, CHAT, json=body).json()["usage"]["prompt_tokens"]

    whole = tokens([{"role": "user", "content": "one two"}])
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert tokens([{"role": "user", "content": parts}]) == whole
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "xyzzy " * 9}
    alone = tokens([user])
    for place in ([system, user], [user, system], [user, system, user]):
        assert tokens(place) > alone + 20
    assert tokens([{"role": "developer", "content": "xyzzy " * 9}, user]) > alone + 20


def test_paths_and_methods(server):
    url = server.url
    assert (
        httpx.post(f"{url}/v1/messages?beta=true", json=BODIES["/v1/messages"]).status_code == 200
    )
    assert httpx.get(f"{url}/v1/nothing").status_code == 404
    assert httpx.get(f"{url}{CHAT}").status_code == 405
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/messages").json()["type"] == "error"


def test_health_and_metrics_say_what_happened(server):
    post(server, CHAT, json=BODIES[CHAT])
    health = httpx.get(f"{server.url}/health").json()
    assert health["status"] == "ok" and health["model"] == "tiny" and health["batching"] == "on"
    text = httpx.get(f"{server.url}/metrics").text
    for name in (
        "spec_requests_total", "spec_completion_tokens_total", "spec_drafted_tokens_total",
        "spec_acceptance_length_bucket", "spec_cap", "spec_parked_share", "spec_queue_length",
        "spec_batch_width", "spec_prefix_cache_hits_total", "spec_prefix_cache_bytes",
        "spec_time_to_first_token_seconds_bucket", "spec_time_per_token_seconds_bucket",
    ):  # fmt: skip
        assert name in text, name


def test_foreign_hosts_and_pages_are_turned_away(server):
    url = server.url
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ):
        answer = httpx.post(f"{url}{CHAT}", json=BODIES[CHAT], headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{url}{CHAT}", headers=preflight).status_code == 403
    own = {"origin": url, "host": url.removeprefix("http://")}
    assert httpx.post(f"{url}{CHAT}", json=BODIES[CHAT], headers=own).status_code == 200
    form = httpx.post(f"{url}{CHAT}", content=json.dumps(BODIES[CHAT]),
                      headers={"content-type": "text/plain"})  # fmt: skip
    assert form.status_code == 400  # what a page may send without asking


def test_a_server_listens_on_loopback_unless_told_otherwise(server, load_tiny):
    assert Settings().host == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")
    assert not server.is_public and Server(load_tiny(), Settings(host="0.0.0.0")).is_public


def test_bound_everywhere_addresses_pass_and_names_do_not(load_tiny):
    with Server(load_tiny(), Settings(host="0.0.0.0", port=0)) as running:
        url = f"http://127.0.0.1:{running.url.rsplit(':', 1)[1]}/v1/models"
        for host, status in (("10.1.2.3:8080", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            assert httpx.get(url, headers={"host": host}).status_code == status


@pytest.fixture(scope="module")
def guarded(load_tiny):
    settings = Settings(
        port=0, api_key="s3cret", cors_origins=("http://good.example",), max_body_bytes=2000,
        allowed_hosts=("box.local",),
    )  # fmt: skip
    with Server(load_tiny(), settings) as running:
        yield running


def test_a_key_is_asked_of_every_route_but_health(guarded):
    for route in ROUTES:
        assert post(guarded, route, json=BODIES[route]).status_code == 401
    for route in ("/v1/models", "/metrics", "/openapi.json"):
        assert httpx.get(f"{guarded.url}{route}").status_code == 401
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    both = {"authorization": "Bearer none", "x-api-key": "s3cret"}  # as the anthropic client may
    for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}, both):
        assert post(guarded, CHAT, json=BODIES[CHAT], headers=headers).status_code == 200
    for headers in ({"authorization": "Bearer s3cre"}, {"x-api-key": "é"}, {"authorization": ""}):
        encoded = {k: v.encode() for k, v in headers.items()}
        assert post(guarded, CHAT, json=BODIES[CHAT], headers=encoded).status_code == 401


def test_configured_origins_and_hosts_are_let_in(guarded):
    headers = {"x-api-key": "s3cret", "origin": "http://good.example"}
    answer = post(guarded, CHAT, json=BODIES[CHAT], headers=headers)
    assert answer.headers["access-control-allow-origin"] == "http://good.example"
    preflight = {
        "origin": "http://good.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-api-key",
    }
    assert httpx.options(f"{guarded.url}{CHAT}", headers=preflight).status_code == 200
    evil = {**preflight, "origin": "http://evil.example"}
    told = httpx.options(f"{guarded.url}{CHAT}", headers=evil)
    assert told.status_code == 400 and "access-control-allow-origin" not in told.headers
    named = {"x-api-key": "s3cret", "host": "box.local:8080"}
    assert post(guarded, CHAT, json=BODIES[CHAT], headers=named).status_code == 200


def test_pages_that_may_call_may_read_why_they_were_refused(guarded):
    good, evil = {"origin": "http://good.example"}, {"origin": "http://evil.example"}
    long = json.dumps({**BODIES[CHAT], "user": "x" * 3000}).encode()
    key = {"x-api-key": "s3cret", "content-type": "application/json"}
    for status, headers, body in (
        (401, {"x-api-key": "wrong"}, b"{}"),
        (403, {**key, "host": "evil.example"}, b"{}"),
        (413, key, long),
    ):
        answer = post(guarded, CHAT, content=body, headers={**headers, **good})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "http://good.example"
    for headers in ({**key, **evil}, {"x-api-key": "wrong", **evil}):
        answer = post(guarded, CHAT, json=BODIES[CHAT], headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert httpx.options(f"{guarded.url}{CHAT}", headers=good).status_code == 401  # no preflight


def test_large_bodies_are_refused_told_or_not(guarded):
    body = json.dumps({**BODIES[CHAT], "user": "x" * 3000}).encode()
    headers = {"x-api-key": "s3cret", "content-type": "application/json"}
    assert post(guarded, CHAT, content=body, headers=headers).status_code == 413

    def pieces():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    assert post(guarded, CHAT, content=pieces(), headers=headers).status_code == 413
    assert post(guarded, CHAT, json=BODIES[CHAT], headers=headers).status_code == 200


class Slow:
    """A target that takes its time, so that tests can leave in the middle."""

    def __init__(self, target, step_s=0.02):
        self._target, self._step_s = target, step_s

    def __getattr__(self, name):
        return getattr(self._target, name)

    def verify(self, *args, **kwargs):
        time.sleep(self._step_s)
        return self._target.verify(*args, **kwargs)

    def verify_rows(self, *args, **kwargs):
        time.sleep(self._step_s)
        return self._target.verify_rows(*args, **kwargs)

    def prefill(self, tokens, *args, **kwargs):
        time.sleep(self._step_s * (20 if len(tokens) >= 16 else 0))
        return self._target.prefill(tokens, *args, **kwargs)


@pytest.fixture
def slow(load_tiny):
    settings = Settings(port=0, max_batch=2, max_queue=2, prefill_chunk=16, keep_alive_s=0.15)
    with Server(load_tiny(wrap=Slow), settings) as running:
        yield running


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


LONG = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900,
        "x_spec": {"max_draft": 0}}  # fmt: skip


def raw_post(server, route, body):
    """A socket on which a request was sent; nothing is read."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/v1/completions", "/v1/responses"])
def test_a_client_that_leaves_frees_its_row_at_once(slow, route, stream):
    bodies = {
        CHAT: LONG,
        "/v1/messages": LONG,
        "/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 900},
        "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 900},
    }
    sock = raw_post(slow, route, {**bodies[route], "stream": stream})
    wait_for(lambda: slow.engine.n_running == 1)
    sock.close()
    wait_for(lambda: slow.engine.n_running == 0, 1.0)
    assert post(slow, CHAT, json=BODIES[CHAT]).status_code == 200
    assert 'outcome="cancelled"' in httpx.get(f"{slow.url}/metrics").text


def test_a_client_that_leaves_during_a_long_prompt_frees_its_row(slow):
    body = {"model": "m", "prompt": [7] * 900, "max_tokens": 5}
    sock = raw_post(slow, "/v1/completions", body)
    wait_for(lambda: slow.engine.n_running == 1)
    sock.close()
    wait_for(lambda: slow.engine.n_running == 0, 1.5)


def test_clients_that_leave_in_every_stage_do_no_harm(slow):
    for stage in range(24):
        sock = raw_post(slow, CHAT, {**LONG, "stream": bool(stage % 2), "max_tokens": 30})
        if stage % 3:
            sock.settimeout(2)
            if stage % 2:
                sock.recv(10 * stage)
        if stage % 4 == 0:
            sock.shutdown(socket.SHUT_WR)
        sock.close()
    cut = raw_post(slow, CHAT, LONG)
    cut.close()
    host, port = slow.url.removeprefix("http://").split(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
    )
    half.close()
    wait_for(lambda: slow.engine.n_running + slow.engine.n_waiting == 0)
    assert post(slow, CHAT, json=BODIES[CHAT]).status_code == 200


def test_a_full_queue_answers_429_and_the_others_finish(slow):
    async def many():
        async with httpx.AsyncClient(base_url=slow.url, timeout=60) as client:
            body = {**LONG, "max_tokens": 20, "temperature": 0}
            return await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(12)))

    answers = asyncio.run(many())
    codes = [a.status_code for a in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= 4
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.headers["retry-after"] and refused.json()["error"]["type"] == "rate_limit_error"
    assert len({a.json()["choices"][0]["message"]["content"] for a in answers if a.is_success}) == 1


@pytest.mark.parametrize(
    ("route", "sign"),
    [(CHAT, '"delta": {}'), ("/v1/messages", "event: ping"), ("/v1/completions", '"text": ""'),
     ("/v1/responses", "event: response.in_progress")],
)  # fmt: skip
def test_streams_stay_alive_during_a_long_prompt(slow, route, sign):
    text = " ".join(f"w{i}" for i in range(60))
    body = {**BODIES[route], "stream": True}
    if route == "/v1/completions":
        body["prompt"] = text
    elif route == "/v1/responses":
        body["input"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    start, seen = time.monotonic(), []
    with httpx.stream("POST", f"{slow.url}{route}", json=body, timeout=30) as answer:
        assert time.monotonic() - start < 1.0, "headers come at once"
        for line in answer.iter_lines():
            seen.append(line)
    assert sum(sign in line for line in seen) >= 3


def test_shutting_down_ends_streams(load_tiny):
    server = Server(load_tiny(wrap=Slow), Settings(port=0))
    server.start()
    lines: list[str] = []

    def read():
        with httpx.stream("POST", f"{server.url}{CHAT}", json={**LONG, "stream": True}) as answer:
            lines.extend(answer.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: server.engine.n_running == 1)
    server.engine.stop()
    thread.join(5)
    server.stop()
    assert not thread.is_alive() and "shutting down" in "".join(lines)
    assert server.engine.status == "stopped"
