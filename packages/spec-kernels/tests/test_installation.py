"""Installing into a model: what is wrapped, reported, refused and restored."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_kernels import ExactError, install, installation, installed, row_invariant, rule_for
from spec_kernels.gate import Gate
from spec_kernels.hardware import Device
from spec_kernels.installed import span
from spec_kernels.race import Verdict

UNKNOWN = Device("metal", "applegpu_g17s", "Apple M5 Max", "Darwin 26.1")


def classes(model):
    return [type(layer) for _, layer in model.named_modules()]


def test_layers_are_wrapped_reported_and_restored(cuda, model):
    before = classes(model)
    installed = install(model, attention_shape=(2, 2, 64))
    report = installed.report()
    assert report.on and not report.exact
    by_shape = {op.shape: op for op in report.ops}
    square = by_shape["128->128 4-bit g64 bfloat16"]
    assert (square.layers, square.kernel, square.serves) == (8, "cuda", "1-2, 8")
    assert square.speedup == {"8": 2.0}
    assert by_shape["128->192 4-bit g64 bfloat16"].layers == 1
    assert by_shape["2/2x64 bfloat16"].serves == "4"
    assert by_shape["2/2x64 bfloat16"].layers == 2
    assert len([c for c in classes(model) if c not in before]) == 11
    installed.uninstall()
    installed.uninstall()
    assert classes(model) == before


def test_q_k_and_v_share_a_launch_where_it_changes_no_bit(cuda, model, monkeypatch):
    attention = model.layers[0]
    with install(model):
        assert attention.q_proj._spec_kernel._shared[0] is attention.v_proj._spec_kernel._shared[0]
        assert attention.o_proj._spec_kernel._shared is None
    monkeypatch.setattr(Gate, "shares", lambda self, together: False)
    with install(model):
        assert attention.q_proj._spec_kernel._shared is None


def test_an_embedding_counts_as_a_head_only_where_the_model_has_no_other(cuda, model):
    model.embed = nn.QuantizedEmbedding(192, 128, 64, 4)
    model.embed.set_dtype(mx.bfloat16)
    tied = nn.QuantizedEmbedding(320, 128, 64, 4)
    tied.set_dtype(mx.bfloat16)
    model.tied = tied
    with install(model):
        assert type(model.embed) is nn.QuantizedEmbedding
        assert type(model.tied) is not nn.QuantizedEmbedding


def test_the_report_is_plain_data(cuda, model):
    with install(model) as installed:
        plain = installed.report().as_dict()
    assert json.loads(json.dumps(plain))["device"]["architecture"] == "sm_90"


def test_a_stall_turns_the_kernels_off_and_says_so(cuda, model):
    with install(model) as installed:
        for _ in range(20):
            installed.observe(0.05)
        assert installed.report().on
        installed.observe(5.0)
        report = installed.report()
        assert not report.on
        assert report.reason.startswith("a verify took 5.00 s, 100 times the median")
        model(mx.zeros((1, 2, 128), mx.bfloat16))
        assert installed.report().calls == {}


def test_the_first_verify_of_a_width_is_no_stall(cuda, model):
    """Something may have been compiled in it, which takes seconds."""
    with install(model, mode="on") as installed:
        for _ in range(20):
            installed.observe(0.05)
        model(mx.zeros((1, 4, 128), mx.bfloat16))
        installed.observe(5.0)
        assert installed.report().on
        model(mx.zeros((1, 4, 128), mx.bfloat16))
        installed.observe(5.0)
        assert not installed.report().on


def test_a_shape_that_loses_every_race_stays_stock(cuda, model, monkeypatch):
    lost = Verdict(True, frozenset(), None, "raced", {"8": 0.7})
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: lost)
    before = classes(model)
    with install(model) as installed:
        assert {op.kernel for op in installed.report().ops} == {"stock"}
        assert not installed.report().on
        assert classes(model) == before


def whole_forwards(monkeypatch, seconds):
    """Outcome of the race of whole forwards, by arm; the arms tried are kept."""
    tried = []

    def race(forward, use, rows_raced):
        assert rows_raced[-1] == 32  # what kernels of CUDA serve
        forward(1)
        for arm in seconds:
            use(arm)
            tried.append(arm)
        return dict.fromkeys((1, 8, 32), seconds)

    monkeypatch.setattr(installed, "race_forwards", race)
    return tried


def test_whole_forwards_have_the_last_word(cuda, model, launched, monkeypatch, tmp_path):
    lost = Verdict(True, frozenset(), None, "raced", {"8": 0.7})
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: lost)
    tried, ran = whole_forwards(monkeypatch, {"stock": 2.0, "raced": 2.0, "all": 1.0}), []
    kept = tmp_path / "verdicts.json"
    with install(model, forward=ran.append, cache=kept) as installed:
        report = installed.report()
        assert report.on and report.arms == {"all": "1-32"}
        assert report.forward_ms["8"] == {"stock": 2000.0, "raced": 2000.0, "all": 1000.0}
        assert launched(model.layers[0].q_proj, 3) == [3]  # with k and v
        assert launched(model.layers[0].o_proj, 3) == [1]
        assert launched(model.layers[0].q_proj, 33) == []
    with install(model, forward=ran.append, cache=kept) as installed:
        assert installed.report().arms == {"all": "1-32"}
    assert tried == ["stock", "raced", "all"] and ran == [1]  # the second time it was known


def test_a_model_whose_forwards_are_no_faster_gets_its_layers_back(cuda, model, monkeypatch):
    before = classes(model)
    whole_forwards(monkeypatch, {"stock": 1.0, "raced": 0.99, "all": 1.5})
    with install(model, forward=lambda rows: None) as installed:
        assert installed.report().arms == {"stock": "1-32"}
        assert not installed.report().on
        assert classes(model) == before


def test_the_shapes_that_won_are_used_alone_where_faster(cuda, model, launched, monkeypatch):
    whole_forwards(monkeypatch, {"stock": 2.0, "raced": 1.0, "all": 1.5})
    with install(model, forward=lambda rows: None):
        assert launched(model.layers[0].q_proj, 8) == [3]
        assert launched(model.layers[0].q_proj, 3) == []


def test_a_failing_forward_leaves_no_layer_wrapped(cuda, model):
    before = classes(model)

    def forward(rows):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        install(model, forward=forward)
    assert classes(model) == before


@pytest.mark.parametrize(("mode", "calls"), [("auto", {"attention plain": 2}), ("off", {})])
def test_an_unknown_cuda_device_keeps_blocks_from_cudnn(cuda, model, monkeypatch, mode, calls):
    """cuDNN plans anew for every length, which a block of a growing text meets every round."""
    monkeypatch.setattr(
        installation, "this_device", lambda: Device("cuda", "sm_120", "RTX 5090", "Linux 6.18")
    )
    model.set_dtype(mx.float32)
    x = mx.random.normal((1, 4, 128), key=mx.random.key(0))
    want, before = model(x), classes(model)
    with install(model, mode=mode, attention_shape=(2, 2, 64)) as installed:
        assert mx.allclose(model(x), want, atol=1e-5)
        model(x[:, :1])  # a single row is MLX's own
        report = installed.report()
        assert not report.on and report.calls == calls and report.ops == ()
        assert installed.least_keys(4) is None
    assert classes(model) == before


def test_an_unknown_generation_is_off_unless_asked_for(cuda, model, monkeypatch):
    monkeypatch.setattr(installation, "this_device", lambda: UNKNOWN)
    report = install(model).report()
    assert not report.on
    assert report.reason == rule_for(UNKNOWN).reason
    with install(model, mode="on") as installed:
        assert installed.report().on
        assert installed.report().reason.startswith("asked for, although: applegpu_g17s")


def test_a_generation_known_but_not_measured_waits_to_be_asked(cuda, model, monkeypatch):
    known = Device("metal", "applegpu_g16s", "Apple M4 Max", "Darwin 26.1")
    monkeypatch.setattr(installation, "this_device", lambda: known)
    report = install(model).report()
    assert not report.on
    assert report.reason.startswith("applegpu_g16s is a known generation, but not measured yet")
    with install(model, mode="on") as installed:
        assert installed.report().on


def test_off_installs_nothing(cuda, model):
    before = classes(model)
    installed = install(model, mode="off")
    assert classes(model) == before
    assert installed.report().reason == "turned off"


def test_exact_serves_every_row_count_and_attention(cuda, model):
    with install(model, exact=True) as installed:
        report = installed.report()
        assert report.exact
        assert {op.serves for op in report.ops} == {"1-32"}
        assert {op.op for op in report.ops} == {"matmul", "attention"}


def test_exact_refuses_an_operation_it_cannot_make_row_by_row(cuda, model):
    model.layers[0].mixer = nn.Conv1d(4, 4, 3)
    with pytest.raises(ExactError, match=r'\[exact\] "layers.0.mixer" must work row by row'):
        install(model, exact=True)


def test_exact_refuses_experts_by_the_name_of_their_operation(cuda, model):
    model.layers[1].switch = type("SwitchLinear", (nn.Module,), {})()
    with pytest.raises(ExactError, match="gather_qmm sorts rows by expert"):
        install(model, exact=True)


def test_exact_refuses_a_quantisation_without_a_kernel_and_leaves_no_layer_wrapped(
    cuda, make_model
):
    model = make_model()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, mode="mxfp4", group_size=32, bits=4)
    before = classes(model)
    with pytest.raises(ExactError, match=r"\[exact\] matmul of .* got: mode mxfp4"):
        install(model, exact=True)
    assert classes(model) == before


def test_exact_refuses_where_the_rules_turn_the_kernels_off(cuda, model, monkeypatch):
    monkeypatch.setattr(installation, "this_device", lambda: UNKNOWN)
    with pytest.raises(ExactError, match="must be on, got: applegpu_g17s is not a known"):
        install(model, exact=True)


def test_exact_refuses_a_model_whose_attention_it_cannot_see(cuda):
    model = nn.Sequential(nn.QuantizedLinear(128, 64, bias=False))
    model.set_dtype(mx.bfloat16)
    with pytest.raises(ExactError, match="a model that never calls it"):
        install(model, exact=True)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="needs a CPU as the default device")
def test_exact_on_a_cpu_changes_nothing_and_holds(make_model):
    """Stock operations are row by row on this CPU; the model's rows show it bit for bit."""
    plain = make_model()
    before = classes(plain)
    with install(plain, exact=True) as installed:
        assert installed.report().exact and classes(plain) == before
        x = mx.random.normal((16, 128), key=mx.random.key(0))
        assert row_invariant(plain.layers[0].q_proj, x)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="needs a CPU as the default device")
def test_exact_on_a_cpu_refuses_a_blas_that_rounds_by_shape(make_model, monkeypatch):
    monkeypatch.setattr("spec_kernels.exact.row_invariant", lambda operation, rows: False)
    with pytest.raises(ExactError, match=r"matmul must .* tools/cpu-blas"):
        install(make_model(), exact=True)


def test_row_invariance_is_seen_to_fail():
    x = mx.random.normal((16, 8), key=mx.random.key(1))
    assert row_invariant(lambda rows: rows * 2, x)
    assert not row_invariant(lambda rows: rows * rows.shape[0], x)


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((1, 2, 3, 8, 10, 11), "1-3, 8, 10-11")]
)
def test_ranges_are_shown_short(numbers, text):
    assert span(numbers) == text
