"""Rotary positions in the variants that heads were trained with.

References:
    RoPE: Su et al. 2021, arXiv:2104.09864. YaRN: Peng et al. 2023, arXiv:2309.00071, section 3.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from spec_core import LoadError


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's settings; names as in `rope_parameters`.

    Attributes:
        factor: Context extension.
        original: Positions of the model before the extension.
        beta_fast: Rotations above which a pair keeps its frequency.
        beta_slow: Rotations below which a pair is slowed down by `factor`.
        attention_factor: Multiplies cos and sin; None is 0.1 ln(factor) + 1.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling: slow pairs are slowed down further, fast ones kept.

    Attributes:
        factor: By how much.
        original: Positions of the model before the extension.
        low: Turns over the original context below which a pair is slowed down whole.
        high: Turns above which it is kept.
    """

    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0


@dataclass(frozen=True, slots=True)
class Linear:
    """All pairs slowed down alike.

    Attributes:
        factor: By how much.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """How queries and keys are rotated.

    Attributes:
        theta: Base of the frequencies.
        dims: Leading dimensions of a head that take part.
        interleaved: Pairs are (2j, 2j + 1) instead of (j, j + dims / 2).
        n_pairs: Only this many pairs turn ("proportional"); None turns all.
        scaling: Context extension, or None.
    """

    theta: float
    dims: int
    interleaved: bool = False
    n_pairs: int | None = None
    scaling: Yarn | Llama3 | Linear | None = None


class Rotation:
    """Applies a `Rope` to rows at consecutive positions.

    Args:
        rope: The variant.
        head_dim: Width of a head.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._rope = rope
        self._periods = _periods(rope)
        self._gain: mx.array | None = None
        if isinstance(rope.scaling, Yarn):
            gain = rope.scaling.attention_factor
            if gain is None:
                gain = 0.1 * math.log(max(rope.scaling.factor, 1.0)) + 1.0
            self._gain = mx.array([gain] * rope.dims + [1.0] * (head_dim - rope.dims))

    def __call__(self, x: mx.array, offset: int | mx.array, *, back: bool = False) -> mx.array:
        """Rotate (..., T, head_dim), whose first row is at position `offset`; `back` undoes it.

        An offset of shape (R,) holds one for each entry of the first axis.
        """
        if self._gain is not None:
            x = x * self._gain.astype(x.dtype)  # the same as scaling cos and sin
        return mx.fast.rope(
            x,
            self._rope.dims,
            traditional=self._rope.interleaved,
            base=None if self._periods is not None else self._rope.theta,
            scale=-1.0 if back else 1.0,
            offset=offset,
            freqs=self._periods,
        )


def _periods(rope: Rope) -> mx.array | None:
    """Reciprocal frequencies, shape (dims / 2,); None where the plain ones hold."""
    half = rope.dims // 2
    plain = [rope.theta ** (2 * j / rope.dims) for j in range(half)]
    if rope.n_pairs is not None:
        return mx.array([p if j < rope.n_pairs else math.inf for j, p in enumerate(plain)])
    scaling = rope.scaling
    if scaling is None:
        return None
    if isinstance(scaling, Linear):
        return mx.array([p * scaling.factor for p in plain])
    if isinstance(scaling, Llama3):
        return mx.array([_llama3_period(scaling, p) for p in plain])
    return mx.array(_yarn_periods(scaling, rope, plain))


def _llama3_period(scaling: Llama3, period: float) -> float:
    turns = scaling.original / (2 * math.pi * period)
    keep = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return 1 / (keep / period + (1 - keep) / (scaling.factor * period))


def _yarn_periods(yarn: Yarn, rope: Rope, plain: list[float]) -> list[float]:
    def pair_at(rotations: float) -> float:
        """Index of the pair that turns this often over the original context."""
        ratio = yarn.original / (rotations * 2 * math.pi)
        return rope.dims * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_at(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_at(yarn.beta_slow)), rope.dims - 1)
    width = (high - low) or 0.001
    periods: list[float] = []
    for j, period in enumerate(plain):
        slow = min(max((j - low) / width, 0.0), 1.0)
        periods.append(1 / (slow / (yarn.factor * period) + (1 - slow) / period))
    return periods


def rope_settings(config: Mapping[str, Any], layers: str = "sliding_attention") -> dict[str, Any]:
    """`rope_parameters`, else `rope_scaling`; of one entry per layer type, that of `layers`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [v for v in parameters.values() if isinstance(v, Mapping)]
    if nested:
        parameters = dict(parameters.get(layers) or nested[0])
    return parameters


def read_theta(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> float | None:
    """The base of the frequencies from wherever a config holds it; None for nowhere."""
    for place in (parameters, config, config.get("rope_scaling") or {}):
        if place.get("rope_theta") is not None:
            return float(place["rope_theta"])
    return None


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_theta: float,
    partial: float = 1.0,
    interleaved: bool = False,
    where: str,
) -> Rope:
    """The rope of a backbone config: `rope_parameters`, `rope_scaling` or plain `rope_theta`.

    Trainers use the rope of sliding layers for all layers.

    Args:
        config: The backbone's config.
        head_dim: Width of a head.
        default_theta: Base when the config names none; a warning tells.
        partial: Share of the head that turns, where the packaging honours one.
        interleaved: Pairing, where the packaging says so.
        where: Family name that opens messages.

    Raises:
        LoadError: a rope type that is not known.
    """
    parameters = rope_settings(config)
    theta = read_theta(config, parameters)
    if theta is None:
        warnings.warn(
            f'[{where}] config.json holds no "rope_theta", so {default_theta:g} is taken. Should '
            "hardly any draft be accepted, set it to what the drafter was trained with.",
            RuntimeWarning,
            stacklevel=2,
        )
        theta = default_theta
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    dims = int(head_dim * partial)
    if kind in ("default", "proportional", "mrope", None):
        return Rope(theta, dims, interleaved)
    return Rope(theta, dims, interleaved, scaling=_scaling(kind, parameters, where))


def _scaling(kind: str, parameters: Mapping[str, Any], where: str) -> Yarn | Llama3 | Linear:
    if kind == "linear":
        return Linear(float(parameters["factor"]))
    if kind not in ("yarn", "llama3"):
        raise LoadError(
            f'[{where}] The rope type must be "default", "linear", "llama3" or "yarn", got '
            f'"{kind}". Use another drafter for this target.'
        )
    original = parameters.get("original_max_position_embeddings")
    if original is None:
        raise LoadError(
            f'[{where}] Rope type "{kind}" needs "original_max_position_embeddings", got none in '
            "the checkpoint's rope settings. Add it to config.json."
        )
    factor = float(parameters["factor"])
    if kind == "llama3":
        low = float(parameters.get("low_freq_factor") or 1.0)
        high = float(parameters.get("high_freq_factor") or 4.0)
        return Llama3(factor, int(original), low, high)
    gain = parameters.get("attention_factor")
    return Yarn(
        factor,
        int(original),
        float(parameters.get("beta_fast") or 32.0),
        float(parameters.get("beta_slow") or 1.0),
        None if gain is None else float(gain),
    )
