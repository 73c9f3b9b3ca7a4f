"""Blocks as compiled graphs: the same results, or else the model's own forward."""

import threading
import weakref

import mlx.core as mx
import pytest

from spec_core import StateError
from spec_targets import compiled
from spec_targets.forward import Forward

FULL = ["full_attention"] * 3
PROMPT = [5, 3, 8, 1, 9, 2, 7, 4]


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forwards of the model's own code."""
    seen, own = [], Forward.__call__

    def call(self, tokens, *rest, **options):
        seen.append(tokens.shape[0])
        return own(self, tokens, *rest, **options)

    monkeypatch.setattr(Forward, "__call__", call)
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
    # For each of two capacities two own forwards, the trace, and the one it is held against; and
    # before all a probe and the prompt.
    assert (of_compiled, len(forwards) - of_compiled) == (2 * 4 + 2, 20 + 2)


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
        mx.eval([entry.state for entry in cache.entries])
    assert mx.get_active_memory() <= before


def test_a_graph_that_differs_by_a_bit_is_never_used(serve, attend_bound, monkeypatch, forwards):
    def inexact(self, q, k, causal):
        attend = attend_bound(self, q, k, causal)
        return lambda q, k, v, *n: attend(q, k, v, *n) * (1 + 1e-6 * len(n))

    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", inexact)
    target = serve("llama")
    rounds(target, 8, rows=2)
    assert [kind.refused for kind in target._compiled._kinds.values()] == [True]
    assert len(forwards) == 2 + 8 + 1  # the probe and the prompt before, and the trace


def test_a_graph_that_is_another_models_is_never_used(serve, monkeypatch, forwards):
    """MLX handed one out that gave taps nobody had asked for."""
    own = mx.compile
    monkeypatch.setattr(mx, "compile", lambda run: lambda *a: [*own(run)(*a), mx.zeros(3)])
    target = serve("llama")
    rounds(target, 8, rows=2)
    assert [kind.refused for kind in target._compiled._kinds.values()] == [True]
    assert len(forwards) == 2 + 8 + 1


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


def test_what_is_replayed_can_be_seen(serve, make_target):
    target = serve("llama")
    assert target.replayed_rows == make_target("llama").replayed_rows == frozenset()
    for rows in (2, 4):
        rounds(target, 4, rows=rows)
    assert target.replayed_rows == {2, 4}
    for race in target._compiled._races.values():
        race.lost = True
    assert target.replayed_rows == frozenset()


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
    (race,) = target._compiled._races.values()
    assert {*race.own_s, *race.replay_s} == {1.0}


@pytest.mark.parametrize(("replay_s", "after"), [(0.9, 2), (1.1, None)])
def test_what_one_width_has_shown_holds_for_the_others(serve, monkeypatch, replay_s, after):
    """At one capacity: a won race lets other widths be traced sooner, a lost one not at all."""
    monkeypatch.setattr(compiled, "RACED", 8)
    monkeypatch.setattr(compiled, "AGAIN_AFTER", 2)
    monkeypatch.setattr(compiled, "ROOM", 128)
    target = serve("llama")
    rounds(target, 3)
    (race,) = target._compiled._races.values()
    race.n, race.own_s, race.replay_s = 8, [1.0], [replay_s]
    rounds(target, 1)  # judges
    rounds(target, 4, rows=3)
    kind = target._compiled._kinds[3, 128, (0, 2), 0, ()]
    assert (kind.graph is not None) == (after is not None) and kind.met == (after or 4)


def test_a_trial_that_fills_its_buffers_proves_nothing(serve, attend_bound, monkeypatch):
    """There a kernel that does not look how many keys there are is right."""

    def careless(self, q, k, causal):
        attend = attend_bound(self, q, k, causal)
        return lambda q, k, v, *n: attend(q, k, v)

    monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", careless)
    monkeypatch.setattr(compiled, "TRIED_AFTER", 6)
    target = serve("llama")
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    for _ in range(6):  # 8 + 6 * 4 = 32
        target.verify(mx.arange(4, dtype=mx.int32), cache)
        target.commit(cache, 4)
    (kind,) = target._compiled._kinds.values()
    assert (cache.offset, kind.met, kind.graph) == (32, 6, None)
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    target.verify(mx.arange(4, dtype=mx.int32), cache)
    assert kind.refused


def test_code_that_never_asks_how_full_buffers_are_keeps_its_own_forward(serve):
    target = serve("gear")  # with a softcap its attention is its own, and no kernel's
    rounds(target, 4)
    assert target._compiled._never


@pytest.mark.parametrize("error", [IndexError, KeyError, AssertionError, ZeroDivisionError])
def test_a_trace_may_fail_in_any_way(serve, monkeypatch, error):
    target = serve("llama")
    rope = type(target.model.layers[0].self_attn.rope)
    own = rope.__call__

    def call(self, x, offset=0):
        if isinstance(offset, mx.array):
            raise error("no position")
        return own(self, x, offset)

    monkeypatch.setattr(rope, "__call__", call)
    assert len(rounds(target, 5)) == 15 and target._compiled._never


def test_a_trial_without_memory_ends_the_graphs_of_its_kind_alone(serve, monkeypatch):
    target, own, left = serve("llama"), mx.eval, [1]

    def evaluate(*arrays):
        if left and isinstance(arrays[0], list) and len(arrays[0]) > 3:  # logits, taps and buffers
            left.clear()
            raise RuntimeError("out of memory")
        own(*arrays)

    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    monkeypatch.setattr(mx, "eval", evaluate)
    for rows in (4, 4, 4, 4, 2, 2, 2, 2):
        target.verify(mx.arange(rows, dtype=mx.int32), cache)
        target.commit(cache, 1)
    kinds = target._compiled._kinds.values()
    assert [(kind.refused, kind.graph is not None) for kind in kinds] == [
        (True, False),
        (False, True),
    ]


def test_an_interrupt_in_a_trace_tears_one_cache_and_nothing_else(serve, monkeypatch):
    target, left = serve("llama"), [1]
    rope = type(target.model.layers[0].self_attn.rope)
    own = rope.__call__

    def call(self, x, offset=0):
        if isinstance(offset, mx.array) and left:
            left.clear()
            raise KeyboardInterrupt
        return own(self, x, offset)

    monkeypatch.setattr(rope, "__call__", call)
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    block = mx.arange(4, dtype=mx.int32)
    for _ in range(2):
        target.verify(block, cache)
        target.commit(cache, 1)
    calls = dict(target.kernels.report().calls)
    with pytest.raises(KeyboardInterrupt):
        target.verify(block, cache)
    assert target.kernels.report().calls == calls
    with pytest.raises(StateError, match="tore"):
        target.verify(block, cache)
    got = rounds(target, 8)
    assert any(kind.graph for kind in target._compiled._kinds.values())
    want = rounds(serve("llama", graphs=False), 8)
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_serves_other_threads(serve):
    """MLX traces again there: that counts no call twice, and its time is no stall."""
    target, got = serve("llama"), []
    want = rounds(target, 8)
    once = target.kernels.report().calls["attention cuda"]
    target.kernels._switch.fresh = False
    cache = target.make_cache()
    target.prefill(PROMPT, cache)

    def elsewhere():
        got.append(target.verify(mx.arange(4, dtype=mx.int32) * 7, cache, taps=(0, 2)).logits)
        mx.eval(got)
        got.append(target.kernels._switch.fresh)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert mx.array_equal(got[0], want[0]) and got[1]
    layers = target.n_layers
    assert target.kernels.report().calls["attention cuda"] == once + 2 * layers  # with the prompt


def test_a_race_keeps_no_cache_alive(serve, monkeypatch):
    monkeypatch.setattr(compiled, "RACED", 100)
    target = serve("llama")
    cache = target.make_cache()
    target.prefill(PROMPT, cache)
    for _ in range(5):
        target.verify(mx.arange(4, dtype=mx.int32), cache)
        target.commit(cache, 1)
    assert target._compiled._begun is not None
    entry = weakref.ref(cache.entries[0])
    del cache
    assert entry() is None


def test_a_race_that_was_lost_is_run_again_much_later():
    race = compiled._Race()
    for _ in range(compiled.RACED):
        race.replays()
    race.own_s, race.replay_s = [1.0] * 12, [1.1] * 12
    assert not race.replays() and race.lost
    n_own = 1
    while not race.replays():
        n_own += 1
    assert n_own == compiled.LATER and not race.lost and race.n == 1


def test_what_disturbs_some_rounds_decides_no_race():
    race = compiled._Race(n=compiled.RACED)
    race.own_s, race.replay_s = [1.0] * 12, [0.9] * 5 + [30.0] * 7
    assert race.replays()


def test_capacities_like_one_another_share_a_race(serve):
    """A text that grows meets a new capacity again and again."""
    target = serve("llama")
    rounds(target, 34)
    kinds, races = target._compiled._kinds, target._compiled._races
    assert [key[1] for key, kind in kinds.items() if kind.graph] == [32, 64, 96]
    assert [key[0] for key in races] == [(32).bit_length(), (64).bit_length()]
