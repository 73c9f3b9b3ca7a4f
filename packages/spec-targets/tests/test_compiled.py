"""Blocks as compiled graphs: the same results, or else the model's own forward."""

import mlx.core as mx
import pytest

from spec_kernels import Installed
from spec_kernels.attention_layers import AttentionKernel, attention_function, wrap_attention
from spec_kernels.hardware import Device
from spec_kernels.layers import Switch
from spec_targets import compiled

CUDA = Device("cuda", "sm_90", "NVIDIA H200", "Linux 6.18")
NAME = "scaled_dot_product_attention"
PAD = 128  # one length for every attention, so that its sums are the same sums
FULL = ["full_attention"] * 3
PROMPT = [5, 3, 8, 1, 9, 2, 7, 4]


def bound(self, q, k, causal):
    """Stands in for the CUDA kernel, with buffers as well."""

    def attend(q, k, v, n_keys=None):
        n = k.shape[2] if n_keys is None else n_keys
        k, v = (mx.pad(x, [(0, 0), (0, 0), (0, PAD - x.shape[2]), (0, 0)]) for x in (k, v))
        last = n - q.shape[2] + mx.arange(q.shape[2])
        seen = mx.arange(PAD)[None] <= last[:, None]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=float(self._scale), mask=seen)

    return attend


@pytest.fixture
def serve(make_target, monkeypatch):
    """Makes a target whose attention goes to the stand-in, as on a CUDA device."""
    monkeypatch.setattr(compiled, "TRIED_AFTER", 3)
    monkeypatch.setattr(compiled, "RACED", 0)
    monkeypatch.setattr(compiled, "ROOM", 32)
    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", bound)
    monkeypatch.setattr("spec_kernels.attention_layers.attention_unsupported", lambda *_: None)

    def make(model_type, layer_types=FULL, **fields):
        target = make_target(model_type, layer_types=layer_types, **fields)
        switch, kernels, layers = Switch(), {}, []
        for _, layer in target.model.named_modules():
            original = attention_function(layer, NAME)
            if original is not None:
                least = dict.fromkeys(range(1, 17), 4)
                kernel = kernels.setdefault(
                    original, AttentionKernel(original, least, switch, "cuda")
                )
                wrap_attention(layer, NAME, kernel)
                layers.append(layer)
        target.use_kernels(Installed(switch, CUDA, "known", [], layers, [*kernels.values()]))
        return target

    return make


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forwards of the model's own code."""
    seen, own = [], compiled.Forward.__call__

    def call(self, tokens, *rest, **options):
        seen.append(tokens.shape[0])
        return own(self, tokens, *rest, **options)

    monkeypatch.setattr(compiled.Forward, "__call__", call)
    return seen


def rounds(target, n, *, rows=4, taps=(0, 2), after=None):
    """Blocks of which 1, 2, 3, .. rows are kept in turn: all logits and taps."""
    cache, found = target.make_cache(), []
    target.prefill(PROMPT, cache)
    for i in range(n):
        block = (mx.arange(rows, dtype=mx.int32) * 7 + i) % target.vocab_size
        output = target.verify(block, cache, taps=taps)
        found += [output.logits, *output.taps]
        mx.eval(found)
        target.commit(cache, i % rows + 1)
        if after is not None:
            after(i)
    return found


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "olmoe"])
def test_a_replay_is_the_models_own_forward(serve, make_target, forwards, model_type):
    got = rounds(serve(model_type), 20)
    of_compiled = len(forwards)
    want = rounds(make_target(model_type, layer_types=FULL), 20)
    for a, b in zip(got, want, strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)
    # For each of two capacities two own forwards, the trace, and the one it is held against; then
    # the block that made room, and before all a probe and the prompt.
    assert (of_compiled, len(forwards) - of_compiled) == (2 * 4 + 1 + 2, 20 + 2)


def test_a_replay_has_the_same_bits(serve, monkeypatch):
    got = rounds(serve("llama"), 20)
    monkeypatch.setattr(compiled, "TRIED_AFTER", 10**9)
    want = rounds(serve("llama"), 20)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_buffers_are_handed_on_without_a_copy(serve):
    target = serve("llama")
    rounds(target, 3)
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    for _ in range(3):
        target.verify(mx.arange(4, dtype=mx.int32), cache, taps=(0, 2))
        target.commit(cache, 2)
    mx.eval([entry.state for entry in cache.entries])
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(3):
        mx.eval(target.verify(mx.arange(4, dtype=mx.int32), cache, taps=(0, 2)).logits)
        target.commit(cache, 2)
    assert mx.get_active_memory() <= before


def test_a_graph_that_differs_by_a_bit_is_never_used(serve, monkeypatch, forwards):
    def inexact(self, q, k, causal):
        attend = bound(self, q, k, causal)
        return lambda q, k, v, *n: attend(q, k, v, *n) * (1 + 1e-6 * len(n))

    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", inexact)
    target = serve("llama")
    rounds(target, 8, rows=2)
    assert [kind.refused for kind in target._compiled._kinds.values()] == [True]
    assert len(forwards) == 2 + 8 + 1  # the probe and the prompt before, and the trace


def test_code_that_asks_for_the_position_keeps_its_own_forward(serve, forwards):
    target = serve("llama")
    rope = type(target.model.layers[0].self_attn.rope)
    own = rope.__call__
    rope.__call__ = lambda self, x, offset=0: own(self, x, int(offset))
    try:
        got = rounds(target, 8)
    finally:
        rope.__call__ = own
    assert len(got) == 24 and target._compiled._never
    assert len(forwards) == 2 + 8 + 1  # the probe and the prompt before, and the trace


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mamba2", "qwen3_5"])
def test_other_states_than_keys_and_values_are_left_alone(serve, model_type):
    target = serve(model_type, layer_types=["sliding_attention", *FULL[1:]])
    rounds(target, 5, taps=())
    assert not target._compiled._kinds


def test_packed_keys_are_left_alone(serve):
    target = serve("llama", kv_bits=8, head_dim=32)
    rounds(target, 5)
    assert not target._compiled._kinds


def test_kernels_that_are_turned_off_end_the_replays(serve, forwards):
    target = serve("llama")

    def after(i):
        if i == 9:
            forwards.clear()
            target.kernels.disable("tried")

    rounds(target, 12, after=after)
    assert forwards == [4, 4]


def test_a_replay_counts_what_its_forward_would(serve):
    target = serve("llama")
    rounds(target, 10)
    prompt = 1  # so short that the kernel serves it
    assert target.kernels.report().calls == {"attention cuda": (prompt + 10) * target.n_layers}


def test_the_watchdog_leaves_the_trial_out(serve, monkeypatch):
    target, asked = serve("llama"), []
    observe = target.kernels._watchdog.observe
    monkeypatch.setattr(
        target.kernels._watchdog, "observe", lambda s: asked.append(s) or observe(s)
    )
    rounds(target, 3)
    n_first = len(asked)
    rounds(target, 1)
    assert (n_first, len(asked)) == (1, 2)  # the first meets the kernel anew, the third is a trial


def test_few_graphs_are_kept(serve, monkeypatch):
    monkeypatch.setattr(compiled, "KEPT", 2)
    target = serve("llama")
    for rows in (2, 3, 4):
        rounds(target, 4, rows=rows)
    assert [key[0] for key in target._compiled._kinds] == [3, 4]


@pytest.mark.parametrize(("replay_s", "kept"), [(0.9, True), (1.1, False)])
def test_a_graph_stays_only_if_its_rounds_are_faster(serve, monkeypatch, replay_s, kept):
    """By turns of two, after the two blocks before the trace and the one of the trial."""
    monkeypatch.setattr(compiled, "RACED", 8)
    monkeypatch.setattr(compiled, "TURN", 2)
    monkeypatch.setattr(compiled, "ROOM", 128)
    target, now, served, take = serve("llama"), [0.0], [], compiled._take
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(compiled, "_take", lambda *a: served.append(len(rounds_s)) or take(*a))
    rounds_s = []

    def after(i):
        rounds_s.append(replay_s if served and served[-1] == i else 1.0)
        now[0] += rounds_s[-1]

    rounds(target, 14, after=after)
    assert served == [3, 4, 7, 8, *([11, 12, 13] if kept else [])]


def test_a_pause_between_two_texts_is_no_round(serve, monkeypatch):
    monkeypatch.setattr(compiled, "RACED", 100)
    target, now = serve("llama"), [0.0]
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: now[0])

    def after(i):
        now[0] += 1.0

    for _ in range(3):
        rounds(target, 4, after=after)
        now[0] += 500.0
    (kind,) = target._compiled._kinds.values()
    assert {*kind.own_s, *kind.replay_s} == {1.0}
