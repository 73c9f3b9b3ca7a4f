"""What a user sees of the few-row kernels, and how to turn them off."""

from types import SimpleNamespace

import pytest

from spec_cli import caps, env
from spec_kernels import Installed, OpState, this_device
from spec_kernels.layers import Switch


def target_with(switch, layers):
    op = OpState("matmul", "4096->1024 4-bit g64 bfloat16", 72, "cuda", "2-16", "raced")
    return SimpleNamespace(kernels=Installed(switch, this_device(), "known", [op], layers))


def test_the_statistics_say_which_rows_the_kernels_serve():
    switch = Switch()
    switch.use(("stock", "stock", *["all"] * 15))
    target = target_with(switch, [object()])
    assert caps.kernel_remarks(target) == ["kernels: 2-16 rows"]
    target.kernels.disable("a verify took 5.00 s, 100 times the median of 50.0 ms")
    assert caps.kernel_remarks(target) == [
        "kernels off: a verify took 5.00 s, 100 times the median of 50.0 ms"
    ]


def test_nothing_is_said_where_there_are_no_kernels(spec, tiny_folder):
    code, _, err = spec("generate", "--raw", "a b", "--model", tiny_folder, "--max-tokens", 2)
    assert code == 0 and "kernels" not in err
    assert caps.kernel_remarks(SimpleNamespace()) == []


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_the_kernels_can_be_chosen(spec, tiny_folder, choice, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "spec_targets.load.install_kernels", lambda *args, **named: asked.append(named["mode"])
    )
    arguments = ("--raw", "a b", "--model", tiny_folder, "--max-tokens", 2, "--kernels", choice)
    assert spec("generate", *arguments)[0] == 0
    assert asked == [choice]


def test_room_is_made_for_graphs_of_every_block_width(monkeypatch):
    monkeypatch.delenv("MLX_CUDA_GRAPH_CACHE_SIZE", raising=False)
    env.prepare_mlx()
    assert env.os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "2000"
    monkeypatch.setenv("MLX_CUDA_GRAPH_CACHE_SIZE", "123")
    env.prepare_mlx()
    assert env.os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "123"
