"""`echo` of /v1/completions: the prompt in front, and its log-probabilities, through the client."""

import httpx
import mlx.core as mx
import openai
import pytest

from spec_server import Server, Settings
from spec_targets import load_target

PROMPT = (
    "The quick brown fox jumps over the lazy dog. It is a small, bright and quiet morning. " * 4
)


@pytest.fixture(scope="module")
def kept(load_tiny):
    with Server(load_tiny(), Settings(port=0)) as running:
        yield running


@pytest.fixture
def client(kept):
    with openai.OpenAI(base_url=f"{kept.url}/v1", api_key="k", max_retries=0) as one:
        yield one


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(
        model="m", prompt=prompt, max_tokens=6, temperature=0, echo=True, **more
    )


def test_the_answer_begins_with_the_prompt(client):
    bare = client.completions.create(model="m", prompt=PROMPT, max_tokens=6, temperature=0)
    echoed = complete(client).choices[0]
    assert echoed.text == PROMPT + bare.choices[0].text and echoed.logprobs is None
    chunks = [c.choices[0].text for c in complete(client, stream=True) if c.choices]
    assert "".join(chunks) == echoed.text and chunks[0].startswith(PROMPT)


def test_lists_of_prompts_are_echoed_each_with_its_own(client):
    prompts = ["The quick", "brown fox jumps"]
    answer = complete(client, prompt=prompts, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        assert choice.text.startswith(prompt) and len(choice.text) > len(prompt)
    ids = complete(client, prompt=[[30, 31, 32], [40, 41]])
    assert len(ids.choices) == 2


def test_the_text_of_ids_keeps_special_tokens_so_that_offsets_fit(client):
    choice = complete(client, prompt=[0, 40, 1, 41], logprobs=0).choices[0]
    assert choice.text.startswith("<|im_start|>") and "<|im_end|>" in choice.text
    for token, at in list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))[
        :4
    ]:
        assert choice.text[at : at + len(token)] == token


def test_logprobs_of_the_prompt_are_the_targets_own(client, folder):
    ids = load_target(folder)[1].encode(PROMPT)
    assert len(ids) > 64  # more than one chunk
    wanted = wanted_logprobs(folder, ids)
    found = complete(client, logprobs=3).choices[0].logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for i, token in enumerate(ids[1:], 1):
        assert found.token_logprobs[i] == pytest.approx(wanted[i - 1, token].item(), abs=1e-3)
        best = wanted[i - 1].max().item()
        assert max(found.top_logprobs[i].values()) == pytest.approx(best, abs=1e-3)
    assert "".join(found.tokens[: len(ids)]) == PROMPT
    assert len(found.tokens) == len(ids) + 6


def wanted_logprobs(folder, ids):
    """Log-probabilities of a plain forward: (N, V)."""
    target, _ = load_target(folder)
    logits = target.verify(mx.array(ids, mx.int32), target.make_cache()).logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(client, folder, stream):
    ids = load_target(folder)[1].encode(PROMPT)
    settings = {"model": "m", "prompt": [ids, ids[:7]], "echo": True, "logprobs": 2}
    whole = client.completions.create(**settings, max_tokens=0)
    if stream:
        chunks = list(client.completions.create(**settings, max_tokens=0, stream=True))
        for choice in whole.choices:
            own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
            assert "".join(c.text for c in own) == choice.text
            assert [t for c in own if c.logprobs for t in c.logprobs.token_logprobs] == (
                choice.logprobs.token_logprobs
            )
            assert own[-1].finish_reason == "length"
        return
    assert [c.text for c in whole.choices] == [PROMPT, "".join(whole.choices[1].logprobs.tokens)]
    assert whole.usage.completion_tokens == 0 and whole.choices[0].finish_reason == "length"
    wanted = wanted_logprobs(folder, ids)
    for choice, given in zip(whole.choices, (ids, ids[:7]), strict=True):
        found = choice.logprobs
        assert len(found.tokens) == len(given) and found.token_logprobs[0] is None
        for i, token in enumerate(given[1:], 1):
            assert found.token_logprobs[i] == pytest.approx(wanted[i - 1, token].item(), abs=1e-3)


def test_a_prompt_that_fills_the_context_is_scored_and_one_longer_is_refused(client, folder):
    ids = [20 + i * i % 300 for i in range(1024)]
    settings = {"model": "m", "echo": True, "logprobs": 0}
    found = client.completions.create(**settings, prompt=ids, max_tokens=0)
    logprobs = found.choices[0].logprobs.token_logprobs
    assert len(logprobs) == found.usage.prompt_tokens == 1024
    assert found.usage.completion_tokens == 0
    wanted = wanted_logprobs(folder, ids[:-1])
    assert logprobs[-1] == pytest.approx(wanted[-1, ids[-1]].item(), abs=1e-3)
    for prompt, n in (([*ids, 20], 0), (ids, 1)):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
            client.completions.create(**settings, prompt=prompt, max_tokens=n)


def test_a_prompt_of_one_token_is_echoed_alone(client):
    settings = {"model": "m", "prompt": [40], "echo": True, "logprobs": 0}
    choice = client.completions.create(**settings, max_tokens=0).choices[0]
    assert choice.logprobs.token_logprobs == [None]


def test_no_answer_and_no_prompt_is_nothing(kept):
    body = {"model": "m", "prompt": "x", "max_tokens": 0}
    refused = httpx.post(f"{kept.url}/v1/completions", json=body)
    assert refused.status_code == 400 and "max_tokens" in refused.text
    body |= {"echo": True}
    answer = httpx.post(f"{kept.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "x" and answer["choices"][0]["logprobs"] is None


def test_the_figures_are_the_same_warm_and_cold(client, kept):
    kept.engine.prefix.entries.clear()
    cold = complete(client, logprobs=2)
    assert kept.engine.prefix.entries  # now there is something to go on from
    client.completions.create(model="m", prompt=PROMPT, max_tokens=3)
    warm = complete(client, logprobs=2)
    assert warm.choices == cold.choices
    assert warm.model_extra["x_spec"]["cached_tokens"] == 0


def test_scored_prompts_beside_others_change_nothing(client, kept):
    want = complete(client, logprobs=1).choices[0]
    pair = complete(client, prompt=[PROMPT, "The lazy dog."], logprobs=1).choices[0]
    assert pair.text == want.text and pair.logprobs.tokens == want.logprobs.tokens
    streamed = [c for c in complete(client, logprobs=1, stream=True) if c.choices]
    tokens = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == want.logprobs.tokens


@pytest.mark.parametrize(("field", "value"), [("suffix", "end"), ("best_of", 2), ("echo", "yes")])
def test_what_is_not_done_is_refused_by_name(kept, field, value):
    body = {"model": "m", "prompt": "x", field: value}
    refused = httpx.post(f"{kept.url}/v1/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field
