"""Single rows that whole forwards let be replayed, or leave alone."""

import mlx.core as mx
import pytest

from spec_kernels.gate import Gate
from spec_kernels.hardware import Device
from spec_targets import single

CUDA = Device("cuda", "sm_90", "NVIDIA H200", "Linux 6.18")
FULL = ["full_attention"] * 3
PROMPT = [5, 3, 8, 1, 9, 2, 7, 4]
BLOCKS = range(2, 17)  # what the race of attention alone lets the kernel serve


@pytest.fixture
def raced(serve, monkeypatch):
    """Seconds of the two arms, which the clock shall find; notes how often it was asked."""
    monkeypatch.setattr(single, "DEPTHS", (20, 50))
    seconds, asked, filled, fill = {"own": 2.0, "replayed": 1.0}, [], [], single._fill
    monkeypatch.setattr(single, "_fill", lambda *a: filled.append(a) or fill(*a))

    def times(arms, run):
        entries, depth = filled[-1]
        for arm in (*arms.values(), *arms.values()):
            run(arm)
            assert {entry.offset for entry in entries} == {depth}
        asked.append(list(arms))
        return dict(seconds)

    monkeypatch.setattr(single, "times", times)
    return seconds, asked


def steps(target, n=12, cache=None):
    """Logits of plain steps."""
    if cache is None:
        cache = target.make_cache()
        target.prefill(PROMPT, cache)
    found = []
    for i in range(n):
        found.append(target.verify(mx.array([3 * i + 1], mx.int32), cache).logits)
        target.commit(cache, 1)
    mx.eval(found)
    return found


def same(got, want):
    return all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_single_rows_that_win_are_replayed_with_the_bits_of_their_own_forward(
    serve, raced, model_type
):
    mx.random.seed(3)
    target, drawn = serve(model_type, queries=BLOCKS), mx.random.uniform()
    mx.random.seed(3)
    raced_target = serve(model_type, queries=BLOCKS, gate=Gate(CUDA))
    assert mx.array_equal(mx.random.uniform(), drawn)  # nothing was drawn from the caller's key
    assert len(raced[1]) == 2 and raced_target.kernels.report().calls == {}
    assert raced_target.kernels.least_keys(1) == 1 and target.kernels.least_keys(1) is None
    got = steps(raced_target)
    assert raced_target.replayed_rows == {1}
    assert same(got, steps(serve(model_type, graphs=False)))  # served from the start, no graphs


def test_single_rows_that_do_not_win_everywhere_stay_as_they_were(serve, raced, monkeypatch):
    at_depths = iter([{"own": 2.0, "replayed": 1.0}, {"own": 1.0, "replayed": 1.0}])
    times = single.times
    monkeypatch.setattr(single, "times", lambda *a: times(*a) and next(at_depths))
    target, twin = serve("llama", queries=BLOCKS, gate=Gate(CUDA)), serve("llama", queries=BLOCKS)
    assert len(raced[1]) == 2 and target.kernels.least_keys(1) is None
    assert same(steps(target), steps(twin)) and target.replayed_rows == frozenset()


def test_the_outcome_is_kept(serve, raced, tmp_path):
    path, (_, asked) = tmp_path / "verdicts.json", raced
    for seconds in ([2.0, 1.0], [1.0, 2.0]):
        raced[0].update(own=seconds[0], replayed=seconds[1])
        target = serve("llama", queries=BLOCKS, gate=Gate(CUDA, path))
        assert target.kernels.least_keys(1) == 1 and len(asked) == 2
    assert serve("qwen3", queries=BLOCKS, gate=Gate(CUDA, path)).kernels.least_keys(1) is None
    assert len(asked) == 4


@pytest.mark.parametrize("where", ["trace", "bits", "clock"])
def test_a_race_that_fails_leaves_the_target_as_it_was(
    serve, raced, attend_bound, monkeypatch, where
):
    def fail(*_):
        raise RuntimeError("out of memory")

    def inexact(self, q, k, causal):
        attend = attend_bound(self, q, k, causal)
        return lambda q, k, v, *n: attend(q, k, v, *n) * (1 + 1e-6 * len(n))

    if where == "trace":
        monkeypatch.setattr("spec_targets.compiled.Buffers.update_and_fetch", fail)
    elif where == "bits":
        monkeypatch.setattr("spec_kernels.attention_layers.RowAttention.bound", inexact)
    else:
        monkeypatch.setattr(single, "times", fail)
    target = serve("llama", queries=BLOCKS, gate=Gate(CUDA))
    assert raced[1] == [] and target.kernels.least_keys(1) is None
    assert target.kernels.least_keys(4) == 4 and not target._compiled._never
    twin = serve("llama", queries=BLOCKS)
    assert same(steps(target), steps(twin)) and target.replayed_rows == frozenset()


def test_caches_in_use_stay_right(serve, raced):
    """A block is open while the kernels are taken up anew."""

    def text(target, between):
        cache, block = target.make_cache(), mx.arange(4, dtype=mx.int32)
        target.prefill(PROMPT, cache)
        for _ in range(5):
            found = [target.verify(block, cache).logits]
            target.commit(cache, 2)
        found.append(target.verify(block, cache).logits)
        between(target)
        target.commit(cache, 3)
        return [*found, *steps(target, cache=cache)]

    def race(target):
        target.kernels._gate = Gate(CUDA)
        target.use_kernels(target.kernels)
        assert target.kernels.least_keys(1) == 1

    target = serve("llama", queries=BLOCKS)
    assert same(text(target, race), text(serve("llama", graphs=False), lambda _: None))
    assert target.replayed_rows == {1}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"kv_bits": 8, "head_dim": 32}),
        ("llama", {"layer_types": ["sliding_attention", *FULL[1:]]}),
        ("qwen3_5", {}),
        ("llama", {"graphs": False}),
    ],
)
def test_what_no_graph_serves_is_not_raced(serve, raced, model_type, fields):
    target = serve(model_type, queries=BLOCKS, gate=Gate(CUDA), **fields)
    assert raced[1] == [] and target.kernels.least_keys(1) is None and target.kernels.epoch == 0


def test_a_layer_that_reads_keys_by_itself_loses(serve, raced):
    target = serve("gear", queries=BLOCKS, gate=Gate(CUDA))  # with a softcap
    assert raced[1] == [] and target.kernels.least_keys(1) is None


@pytest.mark.parametrize(
    ("context_length", "depths"),
    [(None, [500, 8000]), (40960, [500, 8000]), (4096, [500, 3584]), (512, [448])],
)
def test_contexts_are_no_deeper_than_the_model_goes(monkeypatch, context_length, depths):
    class Kernels:
        def race_single(self, model, measure):
            assert model == f"llama {depths}" and measure.args[-1] == depths

    single.race_single(None, [], Kernels(), "llama", context_length)


def test_a_forward_does_not_pay_for_the_other_arm(monkeypatch):
    """What a replay leaves to be written is written by whatever comes next."""
    now, left = [0.0], [0.0]
    monkeypatch.setattr(single.time, "perf_counter", lambda: now[0])

    def run(arm):
        now[0] += arm() + left[0]
        left[0] = 0.5 if arm is replayed else 0.0

    def replayed():
        return 1.0

    assert single.times({"own": lambda: 2.0, "replayed": replayed}, run) == {
        "own": 2.0,
        "replayed": 1.5,
    }
