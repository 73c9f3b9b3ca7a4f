"""The benchmarks still run: each script's arguments, and its main path on a tiny random model.

Knows nothing about figures: a smoke test is no measurement.
"""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.fixture(scope="session")
def model(tmp_path_factory, script, byte_words) -> Path:
    """A model of the tiny shape in four bits."""
    random_model = script("random_model")
    folder = tmp_path_factory.mktemp("random") / "tiny"
    random_model.write(folder, random_model.TINY, 4, byte_words)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_it_tells_its_arguments(run, name):
    code, out = run(name, "--help")
    assert code == 0 and out.startswith(f"usage: {name}.py")


def test_identity_and_decode_speed_compare_with_mlx_lm(run, model):
    code, out = run("identity", "--model", model, "--prompts", 1, "--tokens", 8)
    assert code == 0 and "1 of 1 prompts identical" in out
    code, out = run("decode_speed", "--model", model, "--tokens", 9, "--trials", 1)
    assert code == 0 and "same ids: True" in out and "median ratio" in out


def test_exact_compares_and_tells_the_price(run, model):
    given = ("--model", model, "--prompts", 1, "--tokens", 6)
    code, out = run("exact", *given)
    assert code == 0 and "1 of 1 prompts identical" in out
    code, out = run("exact", *given, "--price")
    assert code == 0 and "of the speed without it" in out


def test_the_cap_race_has_a_row_for_its_prompt_set(run, model, monkeypatch, tmp_path):
    monkeypatch.setattr("spec_cli.caps.BUDGET_S", 0.1)
    given = ("--model", model, "--mode", "lookup", "--caps", "1", "--set", "copy", "--limit", 1)
    written = tmp_path / "race.json"
    code, _ = run("adaptive_cap", *given, "--max-tokens", 6, "--trials", 1, "--write", written)
    (row,) = json.loads(written.read_text())["rows"]
    assert code == 0 and set(row["tokens_per_second"]) == {"0", "1", "auto"}


def test_the_simulated_cap_writes_its_page(run, script, monkeypatch):
    controller = script("controller")
    for name in ("steady_scenarios", "changing_scenarios", "hostile_scenarios"):
        one = getattr(controller, name)()[:1]
        monkeypatch.setattr(controller, name, lambda one=one: one)
    code, out = run("controller", "--seeds", 1, "--random", 1)
    assert code == 0 and out.count("## ") == 4


def test_a_converted_type_has_its_line(script, capsys, tmp_path):
    speed = script("convert_speed")
    size = speed.write(tmp_path / "source.gguf", speed.Kind.Q4_0, 1) / 1e6
    speed.print_row(
        speed.Kind.Q4_0, size, *speed.measure(tmp_path / "source.gguf", 1, synced=False)
    )
    assert capsys.readouterr().out.startswith("Q4_0")


def test_rounds_without_a_model_and_with_rollback_are_timed(run):
    code, out = run("loop_overhead", "--vocab", 16)
    assert code == 0 and out.count("ms a round of Python") == 4
    code, out = run("rollback", "--models", "lfm2", "--trials", 1)
    assert code == 0 and "rollback" in out


def test_a_target_step_is_timed_where_no_head_is_given(run, script, model, monkeypatch):
    monkeypatch.setattr(script("drafters"), "bandwidth", lambda n_bytes: 1e9)
    code, out = run("drafters", "--model", model, "--target-depth", 8, "--repeats", 1, "--cpu")
    assert code == 0 and "target step" in out


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU it measures for minutes")
def test_the_kernels_want_a_gpu_and_their_forwards_run_anywhere(run, script, monkeypatch):
    code, _ = run("kernels")
    assert "need a GPU" in code
    kernels = script("kernels")
    monkeypatch.setattr(kernels, "QWEN3_8B", script("random_model").TINY)
    arms = {"stock": kernels.Lane(kernels.random_target(kernels.QWEN3_8B, 4), 8)}
    assert set(kernels.forward_curves(arms, (1, 2), 1)["stock"]) == {1, 2}
    assert kernels.growing_ms(arms, rounds=1)["stock"] > 0
    assert kernels.decode_ms(arms, tokens=2, turns=1)["stock"] > 0
    assert kernels.exact_rounds(arms["stock"], 4)["rows"] > 0


def test_a_blocks_time_is_split_by_what_the_host_does(run, script, monkeypatch):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 99}
    host_time = script("host_time")
    monkeypatch.setattr(host_time, "SMOLLM2", replace(host_time.SMOLLM2, **small))
    monkeypatch.setattr(host_time, "TAPS", (1,))
    code, out = run("host_time", "--rows", 2, "--repeats", 1)
    assert code == 0 and out.splitlines()[-1].split()[::5] == ["2", "stock"]


def test_the_server_is_timed_and_keeps_a_second_turn(run, model):
    given = ("--concurrency", "1,2", "--tokens", 4, "--trials", 1, "--calibrate", 0.1)
    code, out = run("server_throughput", "--model", model, *given, "--turn-tokens", 40)
    report = json.loads(out)
    assert code == 0 and report["second_turn"]["identical"]
    assert {row["mode"] for row in report["rows"]} == {"baseline", "lookup"}
