"""Kept states: what is found again, and that nothing ever changes by it."""

import random

import httpx
import mlx.core as mx
import pytest

from spec_core import TargetOutput
from spec_core.testing import ToyDrafter
from spec_drafters import LookupDrafter
from spec_server import Server, Settings
from spec_server.jobs import common_prefix
from spec_server.prefix import PrefixCache, state_bytes
from spec_targets import load_target

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)[0]


def prefilled(target, ids):
    cache = target.make_cache()
    target.prefill(ids, cache)
    return cache


def test_common_prefixes_of_random_sequences():
    rng = random.Random(1)
    for _ in range(200):
        a = [rng.randrange(3) for _ in range(rng.randrange(12))]
        b = a[: rng.randrange(13)] + [rng.randrange(3) for _ in range(rng.randrange(4))]
        want = 0
        while want < min(len(a), len(b)) and a[want] == b[want]:
            want += 1
        assert common_prefix(a, b) == want


def test_the_longest_shared_run_is_found_and_one_id_is_left(target):
    kept = PrefixCache(target, 10**8)
    base = list(range(20, 60))
    assert kept.store(base, prefilled(target, base), {})
    other = [*base[:12], *range(100, 130)]
    assert kept.store(other, prefilled(target, other), {})
    assert kept.fetch([*base, 7], None).n_tokens == 40
    assert kept.fetch(base, None).n_tokens == 39
    assert kept.fetch([*base[:20], 9, 9], None).n_tokens == 20
    assert kept.fetch([*other[:30], 9], None).n_tokens == 30
    assert kept.fetch([1, 2, 3], None) is None
    longer = [*base, 1, 2, 3]
    kept.store(longer, prefilled(target, longer), {})
    assert sorted(len(e.tokens) for e in kept.entries) == [42, 43]  # the longer one took over
    assert kept.store(base, prefilled(target, base), {}) is None


def test_the_budget_holds_and_the_least_used_goes_first(target):
    one = prefilled(target, list(range(20, 50)))
    size = target.freeze(one).nbytes
    kept = PrefixCache(target, int(3.5 * size))
    for first in range(6):
        ids = [first, *range(20, 49)]
        kept.store(ids, prefilled(target, ids), {})
        kept.fetch([0, *range(20, 49), 5], None)  # the first one stays in use
        assert kept.nbytes <= kept.budget
    assert {e.tokens[0] for e in kept.entries} == {0, 4, 5}
    assert PrefixCache(target, 0).enabled is False
    tiny = PrefixCache(target, 10)
    assert tiny.store(list(range(20, 50)), one, {}) is None


def test_a_drafter_goes_on_as_if_it_had_seen_the_prompt(target):
    kept = PrefixCache(target, 10**8)
    ids = [20, 21, 22, 23] * 5
    kept.store(ids, prefilled(target, ids), {})
    lookup, fresh = LookupDrafter(), LookupDrafter()
    hit = kept.fetch([*ids[:14], 90, 91], lookup)
    fresh.observe(ids[:14], TargetOutput(mx.zeros((14, 1))))
    assert hit.n_tokens == 14 and lookup.state() == fresh.state()


def test_a_drafter_with_taps_is_restored_where_its_context_was_kept(target):
    kept = PrefixCache(target, 10**8)
    ids = list(range(20, 60))
    drafts = {16: [20, 16], 32: [20, 32], 40: [20, 40]}
    kept.store(ids, prefilled(target, ids), drafts)
    drafter = ToyDrafter(taps=(1,))
    hit = kept.fetch([*ids[:35], 9, 9], drafter)
    assert hit.n_tokens == 32 and drafter.state() == [20, 32]
    assert kept.fetch([*ids[:15], 9], drafter) is None
    assert kept.fetch([*ids, 9], drafter).n_tokens == 40


def test_a_context_that_can_be_shortened_serves_every_length_before(target):
    class Shortening(ToyDrafter):
        def shortened(self, state, n_rows):
            return state[:n_rows] if n_rows >= 12 else None

    kept = PrefixCache(target, 10**8)
    ids = list(range(20, 60))
    kept.store(ids, prefilled(target, ids), {16: ids[:16], 40: ids})
    drafter = Shortening(taps=(1,))
    for n in (39, 35, 20, 16, 12):
        assert kept.fetch([*ids[:n], 9, 9], drafter).n_tokens == n
        assert drafter.state() == ids[:n]
    assert kept.fetch(ids, drafter).n_tokens == 39  # the same prompt again
    assert kept.fetch([*ids[:11], 9], drafter) is None


def test_bytes_of_states():
    array = mx.zeros((4, 4))
    assert state_bytes({1: [array, (array, 3)], 2: None}) == 64
    assert state_bytes((1, 2, 3)) == 0


def complete(server, prompt, **settings):
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12, "logprobs": 2,
            **settings}  # fmt: skip
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body).json()
    choice = answer["choices"][0]
    return (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]), answer["x_spec"]


@pytest.fixture(scope="module")
def cold(load_tiny):
    with Server(load_tiny(), Settings(port=0, prefix_bytes=0, prefill_chunk=16)) as running:
        yield running


@pytest.fixture
def warm(load_tiny):
    with Server(load_tiny(), Settings(port=0, prefill_chunk=16)) as running:
        yield running


def test_a_shared_beginning_with_other_endings_answers_like_a_cold_server(warm, cold):
    rng = random.Random(3)
    shared = [rng.randrange(20, 380) for _ in range(80)]
    n_cached = []
    for i in range(30):
        ending = [rng.randrange(20, 380) for _ in range(1 + i % 9)]
        prompt = shared[: 80 - 2 * (i % 4)] + ending
        got, told = complete(warm, prompt)
        assert got == complete(cold, prompt)[0], i
        n_cached.append(told["cached_tokens"])
    assert n_cached[0] == 0 and min(n_cached[1:]) >= 74


def test_conversations_reuse_what_they_share_and_answer_alike(warm, cold):
    def chat(server, messages, **settings):
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 20, **settings}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        return answer["choices"][0]["message"]["content"], answer["x_spec"]["cached_tokens"]

    messages = [{"role": "system", "content": "Be brief. " * 8}]
    reused = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"Turn {turn}: say something of rivers."})
        text, n = chat(warm, messages)
        assert text == chat(cold, messages)[0]
        reused.append(n)
        messages.append({"role": "assistant", "content": text})
    assert reused[0] == 0 and all(b > a for a, b in zip(reused, reused[1:], strict=False))
    again, n = chat(warm, messages[:-1])  # regenerate
    assert again == messages[-1]["content"] and n > reused[3]
    edited = [*messages[:2], {"role": "assistant", "content": "No."}, *messages[3:-1]]
    text, n = chat(warm, edited)
    assert text == chat(cold, edited)[0] and 20 < n < reused[-1]


HYBRIDS = {
    "lfm2": {},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3_text": {},
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_recurrent_and_window_models_reuse_what_a_conversation_shares(
    load_tiny, folder_of, model_type
):
    load = load_tiny(path=folder_of(model_type, **HYBRIDS[model_type]))

    def chat(server, messages):
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        return answer["choices"][0]["message"]["content"], answer["x_spec"]["cached_tokens"]

    one = Settings(port=0, prefill_chunk=16)
    off = Settings(port=0, prefill_chunk=16, prefix_bytes=0)
    with Server(load, one) as warm, Server(load, off) as cold:
        messages = [{"role": "system", "content": "Be brief. " * 8}]
        reused = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"Turn {turn}."})
            text, n = chat(warm, messages)
            assert text == chat(cold, messages)[0]
            reused.append(n)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "tool", "tool_call_id": "c", "content": "sunny"})
        assert reused[0] == 0 and reused == sorted(set(reused))
        again, n = chat(warm, messages[:-2])  # regenerate
        assert again == messages[-2]["content"] and n > reused[2]


def test_a_state_after_a_stop_inside_a_block_is_right(warm, cold):
    text, _ = complete(cold, [25, 26, 27, 28] * 6, max_tokens=40)
    stop = text[0][len(text[0]) // 2 :][:2]
    first, _ = complete(warm, [25, 26, 27, 28] * 6, max_tokens=40, stop=stop)
    assert first == complete(cold, [25, 26, 27, 28] * 6, max_tokens=40, stop=stop)[0]
    follow = [*([25, 26, 27, 28] * 6), 30, 31]
    assert complete(warm, follow)[0] == complete(cold, follow)[0]


def test_a_request_that_was_dropped_leaves_its_state(warm, cold):
    prompt = [33 + i % 50 for i in range(100)]
    with httpx.stream("POST", f"{warm.url}{COMPLETIONS}", json={
        "model": "m", "prompt": prompt, "max_tokens": 800, "stream": True}) as answer:  # fmt: skip
        for line in answer.iter_lines():
            if line.startswith("data:"):
                break
    got, told = complete(warm, [*prompt, 40])
    assert told["cached_tokens"] >= 100 and got == complete(cold, [*prompt, 40])[0]


def test_growth_stops_at_the_budget(load_tiny):
    with Server(load_tiny(), Settings(port=0, prefix_bytes=200_000)) as server:
        rng = random.Random(4)
        for _ in range(60):
            complete(server, [rng.randrange(20, 380) for _ in range(60)], max_tokens=2)
        told = httpx.get(f"{server.url}/health").json()["prefix_cache"]
        assert 0 < told["bytes"] <= told["budget_bytes"] == 200_000 and told["states"] > 2
