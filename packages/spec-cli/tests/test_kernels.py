"""What a user sees of the few-row kernels, and how to turn them off."""

import io
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import mlx.core as mx
import pytest

from spec_calibrate import Calibration, Choice
from spec_calibrate.samples import UNKNOWN_NOISE
from spec_cli import caps, env
from spec_core import FixedCap
from spec_kernels import Installed, OpState, this_device
from spec_kernels.layers import Switch


def target_with(switch, layers):
    op = OpState("matmul", "4096->1024 4-bit g64 bfloat16", 72, "cuda", "2-16", "raced")
    return SimpleNamespace(kernels=Installed(switch, this_device(), "known", [op], layers))


def test_the_statistics_say_which_rows_the_kernels_serve():
    switch = Switch(16)
    switch.use(("stock", "stock", *["all"] * 15))
    target = target_with(switch, [object()])
    cap = caps.Caps(3, lambda: FixedCap(3), 3)
    assert caps.remarks(cap, cap.make(), target) == ["kernels: 2-16 rows"]
    target.replayed_rows = frozenset({8, 4})
    assert caps.remarks(cap, cap.make(), target) == ["kernels: 2-16 rows, graphs of 4, 8 rows"]
    target.kernels.disable("a verify took 5.00 s, 100 times the median of 50.0 ms")
    assert caps.remarks(cap, cap.make(), target) == [
        "kernels off: a verify took 5.00 s, 100 times the median of 50.0 ms"
    ]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_command_that_tells_statistics_tells_of_the_kernels(
    spec, tiny_folder, command, monkeypatch
):
    monkeypatch.setattr(caps, "_kernel_remarks", lambda target: ["kernels: 2-16 rows"])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    words = ("a b",) if command == "generate" else ()
    code, _, err = spec(command, *words, "--model", tiny_folder, "--max-tokens", 2)
    assert code == 0 and err.rstrip().endswith(" · kernels: 2-16 rows")


def test_a_cap_of_0_that_was_measured_is_explained():
    cap = caps.Caps(0, lambda: FixedCap(0), 7, "digest")
    target = SimpleNamespace()
    assert caps.remarks(cap, cap.make(), target) == [
        "plain decoding measured fastest here (spec calibrate shows it)"
    ]
    assert caps.remarks(replace(cap, key=""), cap.make(), target) == []  # the user asked for 0


def test_a_cap_of_0_that_is_a_guess_is_not_called_measured(spec, tiny_folder, monkeypatch):
    arguments = ("generate", "--raw", "a b", "--model", tiny_folder, "--max-tokens", 2)
    monkeypatch.setattr("spec_calibrate.best_cap", lambda curves, max_draft: Choice(0, 1.0))
    remark = {0.01: "plain decoding measured fastest", UNKNOWN_NOISE: "no drafts is a guess"}
    for noise, words in remark.items():
        monkeypatch.setattr(caps, "calibration_of", lambda *_, n=noise: made_with(n))
        code, _, err = spec(*arguments)
        assert code == 0 and words in err
        assert not any(other in err for other in remark.values() if other != words)


def made_with(noise):
    """A calibration whose measurements lay so far apart."""
    return Calibration(SimpleNamespace(noise=noise), SimpleNamespace(digest="digest"), "", True)


def test_kernels_asked_for_where_there_are_none_are_a_remark(spec, tiny_folder):
    if mx.default_device() != mx.cpu:
        pytest.skip("a GPU has kernels")
    arguments = ("generate", "--raw", "a b", "--model", tiny_folder, "--max-tokens", 2)
    code, _, err = spec(*arguments, "--kernels", "on")
    assert code == 0
    assert "[kernels] --kernels on changes nothing here: no kernels for the CPU. Leave it" in err
    assert "[kernels]" not in spec(*arguments)[2]


def test_nothing_is_said_where_there_are_no_kernels(spec, tiny_folder):
    code, _, err = spec("generate", "--raw", "a b", "--model", tiny_folder, "--max-tokens", 2)
    assert code == 0 and "kernels" not in err


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_the_kernels_can_be_chosen(spec, tiny_folder, choice, monkeypatch):
    asked = []

    def install(target, config, *, mode, **others):
        asked.append(mode)
        return Installed(Switch(16), this_device(), "known", [], [])

    monkeypatch.setattr("spec_targets.load.install_kernels", install)
    arguments = ("--raw", "a b", "--model", tiny_folder, "--max-tokens", 2, "--kernels", choice)
    assert spec("generate", *arguments)[0] == 0
    assert asked == [choice]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLX_USE_CUDA_GRAPHS", "0"),
        ("MLX_CUDA_GRAPH_CACHE_SIZE", "2000"),
        ("MLX_ENABLE_CACHE_THRASHING_CHECK", "0"),  # it would end a server that lives long
    ],
)
def test_mlx_is_told_how_to_go_about_cuda_graphs(monkeypatch, name, value):
    for is_set in (True, False):
        monkeypatch.setenv(name, "")
        if not is_set:
            monkeypatch.delenv(name)
        env.prepare_mlx()
        assert env.os.environ[name] == value
    monkeypatch.setenv(name, "123")
    env.prepare_mlx()
    assert env.os.environ[name] == "123"


def test_compiled_kernels_outlive_a_restart_and_lie_by_mlx_version(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "cuda" / version("mlx")
    for is_set in (True, False):
        monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
        if not is_set:
            monkeypatch.delenv("MLX_PTX_CACHE_DIR")
        env.prepare_mlx()
        assert env.os.environ["MLX_PTX_CACHE_DIR"] == str(folder) == str(env.cuda_modules())
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "other"))
    env.prepare_mlx()
    assert env.cuda_modules() == tmp_path / "other"


def test_the_kernels_keep_their_modules_where_mlx_looks(spec, tiny_folder, monkeypatch, tmp_path):
    kept = []
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("spec_kernels.keep_modules_in", kept.append)
    assert spec("generate", "--raw", "a b", "--model", tiny_folder, "--max-tokens", 2)[0] == 0
    assert kept == [tmp_path]
