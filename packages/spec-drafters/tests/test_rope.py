"""Rotary variants against NumPy, and how configs spell them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError
from spec_drafters._rope import Linear, Llama3, Rope, Rotation, Yarn, read_rope

from .layouts import yarn_frequencies
from .reference import Spec, rotate

DIMS, THETA = 16, 1e4
PLAIN = THETA ** (-2 * np.arange(DIMS // 2) / DIMS)


def llama3_frequencies() -> np.ndarray:
    """Factor 8 over 64 original positions, by the published piecewise rule."""
    wavelengths = 2 * np.pi / PLAIN
    smooth = (64 / wavelengths - 1) / (4 - 1)
    mixed = (1 - smooth) * PLAIN / 8 + smooth * PLAIN
    out = np.where(wavelengths > 64 / 1, PLAIN / 8, mixed)
    return np.where(wavelengths < 64 / 4, PLAIN, out)


CASES: dict[str, tuple[Rope, Spec]] = {
    "plain": (Rope(THETA, DIMS), Spec(theta=THETA)),
    "interleaved": (
        Rope(THETA, DIMS, interleaved=True),
        Spec(theta=THETA, interleaved=True),
    ),
    "partial": (Rope(THETA, 8), Spec(theta=THETA, rope_dims=8)),
    "proportional": (Rope(THETA, DIMS, n_pairs=2), Spec(theta=THETA, gemma_pairs=2)),
    "linear": (Rope(THETA, DIMS, scaling=Linear(4.0)), Spec(frequencies=PLAIN / 4)),
    "llama3": (
        Rope(THETA, DIMS, scaling=Llama3(8.0, 64)),
        Spec(frequencies=llama3_frequencies()),
    ),
    "yarn": (
        Rope(THETA, DIMS, scaling=Yarn(32.0, 64)),
        Spec(frequencies=yarn_frequencies(DIMS, THETA, 32.0, 64), rope_gain=1.34657359),
    ),
    "yarn, explicit gain": (
        Rope(THETA, DIMS, scaling=Yarn(4.0, 64, attention_factor=1.0)),
        Spec(frequencies=yarn_frequencies(DIMS, THETA, 4.0, 64)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy_at_any_offset(name: str) -> None:
    rope, spec = CASES[name]
    x = np.random.default_rng(0).normal(size=(5, 3, DIMS))
    want = rotate(x, np.arange(37, 42), spec)
    rows = mx.array(x.astype(np.float32)).transpose(1, 0, 2)[None]
    got = Rotation(rope, DIMS)(rows, 37)[0].transpose(1, 0, 2)
    np.testing.assert_allclose(np.array(got), want, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_theta": 5e5}, Rope(5e5, DIMS)),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}}, Rope(5e5, DIMS)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(5e5, DIMS, scaling=Linear(2.0)),
        ),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5, DIMS)),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_theta": 5e5}},
            Rope(5e5, DIMS),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            Rope(1e4, DIMS),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "rope_theta": 5e5,
                }
            },
            Rope(5e5, DIMS, scaling=Llama3(8.0, 8192)),
        ),
    ],
)
def test_configs_spell_it_in_several_ways(config: dict[str, Any], wanted: Rope) -> None:
    assert read_rope(config, DIMS, default_theta=1e6, where="test") == wanted


def test_a_base_that_no_place_names_is_told() -> None:
    with pytest.warns(
        RuntimeWarning, match=r'\[test\] config.json holds no "rope_theta", so 1e\+06'
    ):
        assert read_rope({}, DIMS, default_theta=1e6, where="test") == Rope(1e6, DIMS)


def test_a_scaling_without_its_original_length_is_refused() -> None:
    config = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(LoadError, match='"yarn" needs "original_max_position_embeddings"'):
        read_rope(config, DIMS, default_theta=1e6, where="test")
