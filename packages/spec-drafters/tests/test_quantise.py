"""Re-written checkpoints: what is packed, what is kept, and that the packing is faithful."""

import json
import runpy
from pathlib import Path

import mlx.core as mx
import pytest

from spec_core import LoadError
from spec_drafters._checkpoint import open_checkpoint
from spec_drafters.quantise import quantise_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        "fc.weight": mx.random.normal((64, 192), key=mx.random.key(0)).astype(mx.bfloat16),
        "odd.weight": mx.ones((8, 30)),
        "norm.weight": mx.ones((64,)),
        "confidence_head.proj.weight": mx.ones((1, 128)),
        "t2d": mx.array([True, False]),
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"]}))
    return folder


@pytest.mark.parametrize(("bits", "atol"), [(8, 0.03), (4, 0.4)])
def test_matrices_are_packed_and_the_rest_is_kept(
    source: Path, tmp_path: Path, bits: int, atol: float
) -> None:
    counts = quantise_checkpoint(source, tmp_path / "out", bits=bits)
    assert (counts["quantised"], counts["kept"]) == (1, 3)
    made, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    assert made.config["quantization"] == {"group_size": 64, "bits": bits}
    matrix = made.weights("test", 4, mx.float32).matrix("fc", 64, 192)
    assert matrix.quantised is not None and matrix.quantised.bits == bits
    identity = mx.eye(192)
    error = mx.abs(matrix(identity).T - original.tensors["fc.weight"].astype(mx.float32))
    assert error.max().item() < atol
    assert mx.array_equal(made.tensors["odd.weight"], original.tensors["odd.weight"])
    assert "t2d" not in made.tensors


def test_a_quantised_source_is_refused(source: Path, tmp_path: Path) -> None:
    quantise_checkpoint(source, tmp_path / "out")
    with pytest.raises(LoadError, match=r"\[quantise\] The source must not be quantised.*\"out\""):
        quantise_checkpoint(tmp_path / "out", tmp_path / "again")


def test_other_bits_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\[quantise\] bits must be 4 or 8, got 3\."):
        quantise_checkpoint(source, tmp_path / "out", bits=3)


def test_the_tool_writes_what_the_function_does(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tool = Path(__file__).parents[3] / "tools" / "quantise-drafter"
    monkeypatch.setattr("sys.argv", [str(tool), str(source), str(tmp_path / "by-tool")])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(tool), run_name="__main__")
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("1 matrices in 8 bits, 3 tensors kept, ")
    quantise_checkpoint(source, tmp_path / "by-hand")
    made, wanted = (tmp_path / n / "model.safetensors" for n in ("by-tool", "by-hand"))
    assert made.read_bytes() == wanted.read_bytes()
