"""Requests that are decoded together, and what happens when one of them breaks."""

import asyncio
import threading
import time
import weakref

import httpx
import mlx.core as mx
import pytest

from spec_core import LoadError, SpecError
from spec_server import Server, Settings

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def mixed(i: int) -> dict:
    """Request i: other prompts, lengths, settings, drafts."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"Marker-{i}: " + "the quick fox " * (i % 5)}],
        "max_tokens": 5 + 7 * (i % 6),
        "temperature": (0, 1.3)[i % 2],
        "seed": i,
        "logprobs": True,
        "top_logprobs": 3,
        "x_spec": {"max_draft": (4, 0, 2)[i % 3]},
    }
    if i % 4 == 1:
        body |= {"presence_penalty": 0.5, "top_p": 0.9}
    if i % 4 == 2:
        body |= {"stop": ["qu", "e "], "repetition_penalty": 1.2}
    if i % 7 == 3:
        body |= {"response_format": {"type": "json_schema",
                                     "json_schema": {"name": "x", "schema": SCHEMA}}}  # fmt: skip
    if i % 5 == 4:
        body |= {"logit_bias": {"40": 5, "50": -100}}
    return body


def outcome(answer: httpx.Response) -> tuple:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    entries = choice["logprobs"]["content"]
    ids = [tuple(e["bytes"]) for e in entries]
    return (
        choice["message"]["content"],
        ids,
        choice["finish_reason"],
        [e["logprob"] for e in entries],
    )


def noting(name: str, counts: list[int]):
    """A wrap of a target that notes how many sequences share each call of a method."""

    def wrap(target):
        own = getattr(target, name)

        def call(rows, *args, **kwargs):
            counts.append(len(rows))
            return own(rows, *args, **kwargs)

        setattr(target, name, call)
        return target

    return wrap


@pytest.mark.parametrize("max_batch", [8, 1])
def test_every_request_of_a_mixed_crowd_equals_its_solo_run(load_tiny, max_batch):
    settings, widths = Settings(port=0, max_batch=max_batch, prefill_chunk=16), []
    with Server(load_tiny(wrap=noting("verify_rows", widths)), settings) as server:
        alone = [outcome(httpx.post(f"{server.url}{CHAT}", json=mixed(i))) for i in range(24)]
        widths.clear()

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                return await asyncio.gather(*(client.post(CHAT, json=mixed(i)) for i in range(24)))

        for together in (asyncio.run(crowd()), asyncio.run(crowd())):
            for i, answer in enumerate(together):
                text, ids, reason, logprobs = outcome(answer)
                assert (text, ids, reason) == alone[i][:3], i
                pairs = zip(logprobs, alone[i][3], strict=True)
                assert all(abs(a - b) < 1e-3 for a, b in pairs), i
        if max_batch > 1:
            assert server.engine.batch_refusal is None and max(widths) >= 5
        else:
            assert widths == []


class Pads:
    """Stands in for kernels of a device that pads batches, and forwards nothing itself."""

    pads = serves = True

    def __call__(self, blocks, cache, taps):
        return None


def test_requests_whose_prompts_went_through_one_forward_equal_their_solo_runs(load_tiny):
    joint = []

    def wrap(target):
        target._whole = Pads()
        return noting("prefill_rows", joint)(target)

    with Server(load_tiny(wrap=wrap), Settings(port=0, max_batch=8, prefix_bytes=0)) as server:
        alone = [outcome(httpx.post(f"{server.url}{CHAT}", json=mixed(i))) for i in range(16)]
        assert joint == []

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                return await asyncio.gather(*(client.post(CHAT, json=mixed(i)) for i in range(16)))

        for i, answer in enumerate(asyncio.run(crowd())):
            text, ids, reason, logprobs = outcome(answer)
            assert (text, ids, reason) == alone[i][:3], i
            pairs = zip(logprobs, alone[i][3], strict=True)
            assert all(abs(a - b) < 1e-3 for a, b in pairs), i
        assert joint and min(joint) >= 2


def test_a_seeded_request_is_constant_beside_unseeded_ones(load_tiny):
    with Server(load_tiny(), Settings(port=0)) as server:
        seeded = {**mixed(1), "max_tokens": 30}
        free = {"model": "m", "messages": seeded["messages"], "max_tokens": 30, "temperature": 1.3}

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                return await asyncio.gather(
                    client.post(CHAT, json=seeded), *(client.post(CHAT, json=free) for _ in "abc")
                )

        texts = {outcome(asyncio.run(crowd())[0])[0] for _ in range(4)}
        assert len(texts) == 1


class Faulty:
    """A target that fails when it sees one token."""

    def __init__(self, target, token=60):
        self._target, self._token = target, token

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, tokens, *args, **kwargs):
        if self._token in tokens:
            raise MemoryError("out of memory")
        return self._target.prefill(tokens, *args, **kwargs)


def test_a_request_that_fails_fails_alone(load_tiny):
    with Server(load_tiny(wrap=Faulty), Settings(port=0)) as server:
        good = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0}
        bad = {"model": "m", "prompt": [5, 60, 7], "max_tokens": 60}
        want = httpx.post(f"{server.url}/v1/completions", json=good).json()["choices"][0]["text"]

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                bodies = [good, bad, good, {**bad, "stream": True}]
                return await asyncio.gather(
                    *(client.post("/v1/completions", json=b) for b in bodies)
                )

        for _ in range(3):
            first, broken, second, stream = asyncio.run(crowd())
            assert broken.status_code == 500 and "out of memory" in broken.text
            assert '"error"' in stream.text and "[DONE]" not in stream.text
            for answer in (first, second):
                assert answer.json()["choices"][0]["text"] == want
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert server.engine.n_running == 0


def test_a_batch_that_breaks_is_replaced(load_tiny):
    with Server(load_tiny(), Settings(port=0)) as server:
        engine = server.engine
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        url = f"{server.url}/v1/completions"
        want = httpx.post(url, json=body).json()["choices"][0]["text"]

        def explode():
            raise RuntimeError("the batch is broken")

        engine._batch.step = explode
        broken = httpx.post(url, json=body)
        assert broken.status_code == 500 and "the batch is broken" in broken.text
        assert httpx.post(url, json=body).json()["choices"][0]["text"] == want


def test_a_dead_engine_turns_health_red_and_nobody_waits_for_ever(load_tiny):
    with Server(load_tiny(), Settings(port=0)) as server:

        def dies():
            raise SystemExit

        url, body = server.url, {"model": "m", "prompt": [5, 6], "max_tokens": 4}
        server.engine._turn = dies
        end = time.monotonic() + 5
        while server.engine.alive and time.monotonic() < end:
            time.sleep(0.02)
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=10)
        assert refused.status_code == 503


def test_nan_logits_end_in_a_clear_error(load_tiny):
    class Nan(Faulty):
        def prefill(self, tokens, *args, **kwargs):
            output = self._target.prefill(tokens, *args, **kwargs)
            if self._token in tokens:
                return type(output)(output.logits * float("nan"), output.taps)
            return output

    with Server(load_tiny(wrap=Nan), Settings(port=0)) as server:
        body = {"model": "m", "prompt": [60, 61], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 500 and "must be numbers" in answer.text


def test_what_cannot_be_loaded_is_said_by_the_loader():
    def load():
        raise LoadError("[load] no such model")

    with pytest.raises(LoadError, match="no such model"):
        Server(load, Settings(port=0)).load()

    def breaks():
        raise ZeroDivisionError("oops")

    with pytest.raises(SpecError, match="Loading broke off: oops"):
        Server(breaks, Settings(port=0)).load()


def test_a_refusal_leaves_neither_the_thread_nor_the_weights(load_tiny):
    """Either of them, alive when the interpreter ends, makes the process abort."""
    weights = []

    def load():
        served = load_tiny()()
        weights.append(weakref.ref(served.pair.target.model))
        raise LoadError("[load] no such drafter")

    server = Server(load, Settings(port=0))
    with pytest.raises(LoadError, match="no such drafter"):
        server.load()
    assert not server.engine._thread.is_alive() and weights[0]() is None


def test_admission_by_memory(load_tiny):
    with Server(load_tiny(), Settings(port=0, kv_bytes=100_000)) as server:
        fits = {"model": "m", "prompt": [5] * 20, "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=fits).status_code == 200
        most = int(100_000 / server.engine._kv_per_token)
        large = {"model": "m", "prompt": [5] * (most + 1), "max_tokens": 4}
        refused = httpx.post(f"{server.url}/v1/completions", json=large)
        assert refused.status_code == 400 and "maximum context length" in refused.text

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = {**fits, "prompt": [5] * (most // 2), "temperature": 0}
                return await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(4))
                )

        assert {a.status_code for a in asyncio.run(crowd())} == {200}


@pytest.mark.parametrize("pads", [False, True])
def test_requests_that_share_a_forward_stay_inside_the_memory_given(load_tiny, pads):
    """A long one beside short ones: each of their rows is as long as its own."""
    held = []

    def wrap(target):
        target._whole, own = Pads() if pads else None, target.join

        def join(caches):
            batch = own(caches)
            held.append(batch.nbytes)
            return batch

        target.join = join
        return target

    def body(n):
        return {"model": "m", "prompt": [5] * n, "max_tokens": 60, "temperature": 0}

    budget = 128 * 2500  # bytes a token: for two or three like the long one, for all by their sum
    settings = Settings(port=0, prefix_bytes=0, kv_bytes=budget)
    with Server(load_tiny(wrap=wrap), settings) as server:
        assert server.engine._kv_per_token == 128

        async def crowd():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                bodies = [body(700), body(20), body(30), body(25), body(15)]
                posts = (client.post("/v1/completions", json=b) for b in bodies)
                return await asyncio.gather(*posts)

        held.clear()  # of the trial whether rows can be joined
        assert {a.status_code for a in asyncio.run(crowd())} == {200}
    assert held and max(held) <= budget


def test_settings_outside_their_range_are_refused():
    for wrong in ({"max_batch": 0}, {"max_queue": -1}, {"keep_alive_s": 0}, {"api_key": ""}):
        with pytest.raises(ValueError, match=r"\[serve\]"):
            Settings(**wrong)


@pytest.mark.parametrize("loads", [True, False])
def test_the_engines_thread_gives_its_streams_back(load_tiny, monkeypatch, loads):
    """MLX asks for it at a thread's end: on CUDA the process aborts otherwise."""
    cleared, clear = [], mx.clear_streams
    monkeypatch.setattr(
        mx, "clear_streams", lambda: (cleared.append(threading.current_thread().name), clear())
    )

    def breaks():
        mx.eval(mx.ones(3) + 1)
        raise LoadError("[load] no such model")

    if loads:
        with Server(load_tiny(), Settings(port=0)) as server:
            body = {"model": "m", "prompt": [5] * 9, "max_tokens": 4}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
            assert not cleared
    else:
        with pytest.raises(LoadError):
            Server(breaks, Settings(port=0)).load()
    assert cleared == ["spec-engine"]
