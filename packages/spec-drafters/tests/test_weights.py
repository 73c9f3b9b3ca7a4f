"""Taking tensors: FP8 and NVFP4 exports, MLX packing, and quantising at load."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError
from spec_drafters import DSparkDrafter
from spec_drafters._weights import Weights, from_fp8, from_nvfp4
from spec_drafters.quantise import quantise_checkpoint

from .checkpoints import TinyTarget, write
from .layouts import LAYOUTS
from .nvfp4 import e4m3_bits, e4m3_value, pack
from .parity import Session
from .reference import Tensors

rng = np.random.default_rng(2)


def test_nvfp4_is_unpacked_low_nibble_first() -> None:
    matrix = rng.normal(size=(6, 64))
    stored, values = pack(matrix)
    parts = [mx.array(stored[k]) for k in ("weight", "weight_scale", "weight_scale_2")]
    got = np.array(from_nvfp4(*parts))
    np.testing.assert_allclose(got, values, rtol=1e-6)
    assert np.abs(got - matrix).max() < 0.7  # four bits, but the same matrix


@pytest.mark.parametrize(
    "scale",
    [
        np.array(0.5),
        np.array([0.25]),
        rng.uniform(0.1, 1, 150),
        rng.uniform(0.1, 1, (150, 1)),
        rng.uniform(0.1, 1, (2, 3)),  # blocks of 128, the last ones partial
    ],
)
def test_fp8_scales_apply_to_all_to_rows_or_to_blocks(scale: np.ndarray) -> None:
    bits = e4m3_bits(rng.uniform(0, 4, (150, 300))) | (rng.integers(0, 2, (150, 300)) << 7)
    bits = bits.astype(np.uint8)
    if scale.ndim == 2 and scale.shape == (2, 3):
        wide = np.kron(scale, np.ones((128, 128)))[:150, :300]
    else:
        wide = scale.reshape(-1, 1)
    got = from_fp8(mx.array(bits), mx.array(scale.astype(np.float32)))
    np.testing.assert_allclose(np.array(got), e4m3_value(bits) * wide, rtol=1e-5)


def test_an_fp8_file_loads(tmp_path: Path) -> None:
    """Written byte by byte, with the dtype name that exporters use."""
    bits = e4m3_bits(rng.uniform(0, 2, (4, 8)))
    scale = np.array([[0.5]], np.float32)
    body = bits.tobytes() + scale.tobytes()
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [0, 32]},
        "a.weight_scale": {"dtype": "F32", "shape": [1, 1], "data_offsets": [32, 36]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    tensors: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    matrix = Weights("test", tensors, bits=16, dtype=mx.float32).matrix("a", 4, 8)
    np.testing.assert_allclose(np.array(matrix.weight), e4m3_value(bits) * 0.5, rtol=1e-6)


def as_loaded(tensors: Tensors, bits: int, *, widest: int) -> Tensors:
    """The values that matrices have after quantising in groups of 64 or 32 columns."""
    values = {}
    for name, array in tensors.items():
        values[name] = array
        if array.ndim != 2 or array.shape[1] % 32 or name.startswith("confidence_head"):
            continue
        group = widest if array.shape[1] % widest == 0 else 32
        packed = mx.quantize(mx.array(array.astype(np.float32)), group_size=group, bits=bits)
        values[name] = np.array(mx.dequantize(*packed, group_size=group, bits=bits)).astype(float)
    return values


@pytest.mark.parametrize("name", ["deepspec, own ends", "gemma4, own ends", "speculators, reduced"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_at_load_equals_the_reference_on_those_values(
    name: str, bits: int, tmp_path: Path
) -> None:
    layout, target = LAYOUTS[name](), TinyTarget()
    write(tmp_path, layout.config, layout.tensors)
    drafter = DSparkDrafter.load(tmp_path, target, bits=bits)
    session = Session(drafter, target, as_loaded(layout.tensors, bits, widest=64))
    session.observe(8)
    session.check(layout.spec, n_rounds=2)


@pytest.mark.parametrize(("bits", "held"), [(4, 8), (8, 8), (16, 16)])
def test_a_quantised_checkpoint_stays_packed_or_is_unpacked(
    bits: int, held: int, tmp_path: Path
) -> None:
    layout, target = LAYOUTS["deepspec, own ends"](), TinyTarget()
    write(tmp_path / "full", layout.config, layout.tensors)
    quantise_checkpoint(tmp_path / "full", tmp_path / "packed", bits=8, group_size=32)
    drafter = DSparkDrafter.load(tmp_path / "packed", target, bits=bits)
    assert drafter.report.bits == held
    session = Session(drafter, target, as_loaded(layout.tensors, 8, widest=32))
    session.observe(8)
    session.check(layout.spec, n_rounds=2)


def test_another_packing_than_affine_is_refused(tmp_path: Path) -> None:
    layout = LAYOUTS["deepspec, own ends"]()
    write(tmp_path / "full", layout.config, layout.tensors)
    quantise_checkpoint(tmp_path / "full", tmp_path / "packed", group_size=32)
    file = str(tmp_path / "packed" / "model.safetensors")
    tensors: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    mx.eval(tensors)
    del tensors["fc.biases"]
    mx.save_safetensors(file, tensors)
    with pytest.raises(LoadError, match='"fc.scales" must come with "fc.biases"'):
        DSparkDrafter.load(tmp_path / "packed", TinyTarget())
