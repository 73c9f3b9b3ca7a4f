"""Prompts of hybrid and windowed models that share their beginning go on from a rung on the way."""

import httpx
import pytest

from spec_core import FixedCap, Pair
from spec_core.testing import ToyDrafter
from spec_drafters import DraftModelDrafter, LookupDrafter
from spec_server import Served, Server, Settings
from spec_server.prefix import Rungs
from spec_targets import MlxTarget, load_target
from spec_targets.families import FAMILIES
from spec_targets.tiny import tiny_model

SYSTEM = [20 + i * i % 300 for i in range(1000)]
FIRST = [*SYSTEM, *range(30, 60)]
SECOND = [*SYSTEM, *range(90, 140)]
TYPES = ["qwen3_5", "lfm2", "gemma3_text"]


def target_of(folder, model_type):
    _, tokenizer = load_target(folder)
    vocab = len(tokenizer.wrapper._tokenizer)
    model = tiny_model(model_type, vocab_size=vocab, max_position_embeddings=4096)
    return MlxTarget(model, FAMILIES[model_type], model_type, 4096, n_heads=4), tokenizer


def loader(folder, model_type, make_drafter):
    def load():
        target, tokenizer = target_of(folder, model_type)
        pair = Pair(target, make_drafter(target), tokenizer)
        return Served(pair, "hybrid", "lookup", lambda wish: FixedCap(3 if wish is None else wish))

    return load


def complete(server, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["text"], answer["x_spec"]["cached_tokens"]


def lookup(target):
    return LookupDrafter(min_match=1)


def tapping(target):
    return ToyDrafter(target.vocab_size, taps=(1,))


@pytest.mark.parametrize("make_drafter", [lookup, tapping])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_conversation_that_shares_the_system_prompt_goes_on_from_a_rung(
    folder, model_type, make_drafter
):
    load = loader(folder, model_type, make_drafter)
    with Server(load, Settings(port=0, prefix_bytes=0)) as server:
        cold = [complete(server, prompt) for prompt in (FIRST, SECOND)]
        assert [n for _, n in cold] == [0, 0]
    with Server(load, Settings(port=0, prefill_chunk=256)) as server:
        assert complete(server, FIRST) == cold[0]
        text, n_cached = complete(server, SECOND)
        assert text == cold[1][0] and n_cached >= 768  # a window may reach back to the very fork
        again, n_cached = complete(server, SECOND)
        assert again == text and n_cached >= 1024  # from its own rungs
        follow = [*SYSTEM[:600], 7, 7, 7]
        assert 512 <= complete(server, follow)[1] <= 600  # rungs of the first were handed on
        assert server.engine.prefix.nbytes <= server.engine.prefix.budget


@pytest.mark.parametrize("model_type", TYPES)
def test_rungs_outlive_the_server_on_disk(folder, model_type, tmp_path):
    load = loader(folder, model_type, lookup)
    settings = Settings(port=0, prefill_chunk=256, prefix_dir=tmp_path / "states")
    with Server(load, Settings(port=0, prefix_bytes=0)) as server:
        cold = complete(server, SECOND)
    with Server(load, settings) as server:
        complete(server, FIRST)
    with Server(load, settings) as server:
        text, n_cached = complete(server, SECOND)
        assert text == cold[0] and n_cached >= 768
        assert server.engine.prefix.nbytes <= server.engine.prefix.budget


def test_rungs_thin_out_within_their_share(folder):
    target, _ = target_of(folder, "qwen3_5")
    cache = target.make_cache()
    target.prefill(SYSTEM[:8], cache)
    rungs = Rungs(target, 2**40)
    rungs.add(cache)
    one = rungs._nbytes
    few = Rungs(target, 4 * one)
    for start in range(8, 168, 8):
        target.prefill(SYSTEM[start : start + 8], cache)
        few.add(cache)
        assert few._nbytes <= 4 * one and cache.offset in few.by_length
    lengths = sorted(few.by_length)
    assert 3 <= len(lengths) <= 4 and lengths[0] < 120
    none = Rungs(target, one // 2)
    none.add(cache)
    assert none.by_length == {}
    assert Rungs(object(), 2**30).add(cache) is None


def test_a_small_model_reads_a_conversation_once(folder):
    """As the target does: jundot/omlx#1441."""
    rows = []

    def drafting(target):
        small, _ = target_of(folder, "qwen3")
        for name in ("prefill", "verify"):
            forward = getattr(small, name)

            def counted(tokens, *args, forward=forward, **more):
                rows.append(len(tokens))
                return forward(tokens, *args, **more)

            setattr(small, name, counted)
        return DraftModelDrafter(small, target)

    def read(server, prompt):
        rows.clear()
        text, n_cached = complete(server, prompt)
        return text, n_cached, sum(rows)

    prompts = (FIRST, [*FIRST, 5, 6, 7], SECOND)
    with Server(loader(folder, "qwen3", lookup), Settings(port=0, prefix_bytes=0)) as server:
        cold = [complete(server, prompt)[0] for prompt in prompts]
    with Server(loader(folder, "qwen3", drafting), Settings(port=0)) as server:
        answers = [read(server, prompt) for prompt in prompts]
    assert [text for text, _, _ in answers] == cold
    assert answers[0][2] > 1000
    for _, n_cached, n_read in answers[1:]:
        assert n_cached >= 1000 and n_read < 300
