"""Who attends for one query, by whole forwards: what follows from them, and what is kept."""

import mlx.core as mx
import pytest

from spec_kernels import KernelError, install, installation
from spec_kernels.gate import Gate
from spec_kernels.hardware import Device
from spec_kernels.race import AttentionVerdict


def single_race(seconds, model, seen):
    """Outcome of the race of single rows; what serves one query meanwhile is noted."""

    def measure(use):
        use(True)
        model(mx.zeros((1, 2, 128), mx.bfloat16))
        seen.append(model.installed.least_keys(1))
        use(False)
        seen.append(model.installed.least_keys(1))
        if isinstance(seconds, Exception):
            use(True)
            raise seconds
        return seconds

    return measure


def test_whole_forwards_of_one_row_have_the_last_word_on_one_query(cuda, model, launched, tmp_path):
    kept, seen = tmp_path / "verdicts.json", []
    won = {500: {"own": 2.0, "replayed": 1.0}, 8000: {"own": 1.1, "replayed": 1.0}}
    with install(model, attention_shape=(2, 2, 64), cache=kept) as installed:
        object.__setattr__(model, "installed", installed)
        assert installed.least_keys(1) is None
        epoch = installed.epoch
        installed.race_single("qwen3", single_race(won, model, seen))
        assert seen == [1, None] and installed.least_keys(1) == 1 and installed.epoch > epoch
        (state,) = (op for op in installed.report().ops if op.op == "attention")
        assert (state.kernel, state.serves) == ("cuda", "1, 4")
        assert state.speedup == {"4@512": 1.5, "forward 1@500": 2.0, "forward 1@8000": 1.1}
        assert state.reason.endswith("one query: whole forwards, replayed, were faster")
        assert installed.report().calls == {}
    with install(model, attention_shape=(2, 2, 64), cache=kept) as again:
        again.race_single("qwen3", single_race(RuntimeError("known already"), model, seen))
        assert again.least_keys(1) == 1 and len(seen) == 2
        assert [op.serves for op in again.report().ops if op.op == "attention"] == ["1, 4"]
    with install(model, attention_shape=(2, 2, 64), cache=kept) as other:
        object.__setattr__(model, "installed", other)
        other.race_single("llama", single_race({}, model, seen))
        assert other.least_keys(1) is None and len(seen) == 4


@pytest.mark.parametrize(
    ("seconds", "reason", "is_kept"),
    [
        (
            {500: {"own": 2.0, "replayed": 1.0}, 8000: {"own": 1.0, "replayed": 1.0}},
            "not faster",
            True,
        ),
        ({}, "cannot be replayed", True),
        (ZeroDivisionError(), "refused: ZeroDivisionError", True),
        (KernelError("[x] no such shape"), "refused: [x] no such shape", True),
        (
            RuntimeError("[cuda] Out of memory.\nand more"),
            "refused this time: [cuda] Out of memory",
            False,
        ),
        (MemoryError(), "refused this time: MemoryError", False),
    ],
)
def test_a_race_of_single_rows_that_is_not_won_changes_nothing(
    cuda, model, launched, tmp_path, seconds, reason, is_kept
):
    kept, seen = tmp_path / "verdicts.json", []
    for n in (2, 2 if is_kept else 4):  # the second time it is known
        with install(model, attention_shape=(2, 2, 64), cache=kept) as installed:
            object.__setattr__(model, "installed", installed)
            installed.race_single("qwen3", single_race(seconds, model, seen))
            assert len(seen) == n
            assert installed.least_keys(1) is None and installed.least_keys(4) == 512
            (state,) = (op for op in installed.report().ops if op.op == "attention")
            assert state.serves == "4" and state.reason.endswith(reason)
            assert installed.report().calls == {}


@pytest.mark.parametrize("what", ["exact", "off", "wrong", "unknown", "metal", "served", "none"])
def test_single_rows_are_raced_only_where_they_may_win(cuda, model, monkeypatch, what):
    options = {"attention_shape": (2, 2, 64)}
    if what == "exact":
        options["exact"] = True
    elif what == "off":
        options["mode"] = "off"
    elif what == "none":
        options = {}
    elif what in ("wrong", "served"):
        verdict = AttentionVerdict(what == "served", {1: 1} if what == "served" else {}, "")
        monkeypatch.setattr(Gate, "_measure_attention", lambda self, shape: verdict)
    else:
        metal = Device("metal", "applegpu_g17s", "Apple M5 Max", "Darwin 26.1")
        cuda_unknown = Device("cuda", "sm_120", "RTX 5090", "Linux 6.18")
        device = cuda_unknown if what == "unknown" else metal
        monkeypatch.setattr(installation, "this_device", lambda: device)
        options["mode"] = "auto" if what == "unknown" else "on"
    with install(model, **options) as installed:
        before = installed.report(), installed.epoch
        installed.race_single("qwen3", lambda use: pytest.fail("raced"))
        assert (installed.report(), installed.epoch) == before
