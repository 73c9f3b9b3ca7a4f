"""Every Metal text passes the linter; texts and names are fit for MLX's cache."""

from importlib import resources

import mlx.core as mx
import pytest
from metal_emulator import lint

from spec_kernels import _build
from spec_kernels._build import Text, cuda_kernel, read_text, revision

METAL = sorted(p.name for p in (resources.files("spec_kernels") / "metal").iterdir())


@pytest.mark.parametrize("name", METAL)
def test_metal_text_passes_the_linter(name):
    assert lint(read_text("metal", name)) == []


def test_the_linter_sees_a_missing_address_space_in_a_real_kernel():
    text = read_text("metal", "row_attention.metal")
    broken = text.replace("const device T* kp", "const T* kp")
    assert broken != text
    assert len(lint(broken)) == 1


def test_a_revision_names_the_texts():
    assert len(revision()) == 12 and revision() == revision()


def test_a_cuda_name_carries_everything_that_goes_into_the_kernel(monkeypatch):
    """MLX's CUDA backend finds compiled kernels by name alone."""
    names = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **k: names.append(k["name"]))
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "text of " + name)
    text = Text("op", ("x",), ("y",), header="op_header")
    for template, threads, blocks in (
        ((("T", mx.float16),), 128, 1),
        ((("T", mx.bfloat16),), 128, 1),
        ((("T", mx.float16),), 256, 1),
        ((("T", mx.float16),), 128, 2),
    ):
        cuda_kernel.__wrapped__(text, template, threads, blocks)
    monkeypatch.setattr(_build, "read_text", lambda folder, name: "another text")
    cuda_kernel.__wrapped__(text, (("T", mx.float16),), 128, 1)
    assert len(set(names)) == 5
    assert all(name.startswith("spec_op_") for name in names)
