"""Emulated kernels, or the reason why there are none; a tiny model with stand-ins for CUDA."""

import metal_emulator
import mlx.core as mx
import mlx.nn as nn
import pytest

from spec_kernels import installation
from spec_kernels.gate import Gate
from spec_kernels.hardware import Device
from spec_kernels.matmul import RowMatmul
from spec_kernels.race import AttentionVerdict, Verdict

CUDA = Device("cuda", "sm_90", "NVIDIA H200", "Linux 6.18")
SOME = Verdict(True, frozenset({1, 2, 8}), None, "raced", {"8": 2.0})


@pytest.fixture(scope="session")
def emulator() -> None:
    """Skips a test that runs Metal text on a machine without g++ or AVX2."""
    reason = metal_emulator.missing_tools()
    if reason is not None:
        pytest.skip(reason)


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(128, 128, bias=False)
        self.k_proj = nn.Linear(128, 128, bias=False)
        self.v_proj = nn.Linear(128, 128, bias=False)
        self.o_proj = nn.Linear(128, 128, bias=False)
        self.norm = nn.RMSNorm(128)

    def __call__(self, x):
        q = self.q_proj(self.norm(x)).reshape(1, -1, 2, 64).transpose(0, 2, 1, 3)
        out = scaled_dot_product_attention(q, q, q, cache=None, scale=0.125, mask="causal")
        return x + self.o_proj(out.transpose(0, 2, 1, 3).reshape(x.shape))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Block(), Block()]
        self.head = nn.Linear(128, 192, bias=False)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def make_model():
    return Model


@pytest.fixture
def model():
    made = Model()
    made.set_dtype(mx.bfloat16)
    nn.quantize(made, group_size=64, bits=4)
    return made


@pytest.fixture
def cuda(monkeypatch):
    """An installation as on a CUDA machine, up to the first launch."""
    monkeypatch.setattr(installation, "this_device", lambda: CUDA)
    monkeypatch.setattr("spec_kernels.matmul.cuda_kernel", lambda *a: None)
    monkeypatch.setattr(Gate, "shares", lambda self, together: True)
    monkeypatch.setattr(Gate, "_measure_matmul", lambda self, shape: SOME)
    attention = AttentionVerdict(True, {4: 512}, "raced", {"4@512": 1.5})
    monkeypatch.setattr(Gate, "_measure_attention", lambda self, shape: attention)


@pytest.fixture
def launched(monkeypatch):
    """A function from a wrapped layer and a number of rows to the weights its launch has."""
    launches: list[int] = []

    def bound(matmul, shape):
        def launch(x):
            launches.append(len(matmul.weights))
            return [mx.zeros((*shape[:-1], weight.n), x.dtype) for weight in matmul.weights]

        return launch, True

    monkeypatch.setattr(RowMatmul, "bound", bound)

    def launched(layer, rows):
        launches.clear()
        layer(mx.zeros((1, rows, 128), mx.bfloat16))
        return launches

    return launched
