"""Decides on the device, once per shape, whether a kernel replaces stock MLX.

Numerics first, then a race; a shape that fails or loses stays stock. Verdicts are kept in a file,
keyed by everything that could change them; one for want of memory holds for this process. Knows
shapes, no models.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_kernels._build import MAX_ROWS, revision
from spec_kernels._files import replace_file
from spec_kernels.hardware import Device
from spec_kernels.matmul import RowMatmul
from spec_kernels.numerics import AttentionShape, MatmulShape, attention_problem, matmul_problem
from spec_kernels.race import AttentionVerdict, Verdict, race_attention, race_matmul

TRIED_OUTPUTS = 16384
_THIS_TIME = "refused this time: "
_LACKS_MEMORY = ("memory", "unable to allocate")  # MLX says so in a RuntimeError


class Gate:
    """Verdicts for one device.

    Args:
        device: part of the key of every verdict.
        path: JSON file that keeps verdicts between processes, or None.
        race: False takes every shape that is correct, without timing it.
    """

    def __init__(self, device: Device, path: Path | None = None, *, race: bool = True) -> None:
        self._where, self._path, self._race = device.backend, path, race
        mlx_version = metadata.version("mlx")
        self._prefix = f"{device.architecture}|{device.system}|{mlx_version}|{revision()}"
        self._stored: dict[str, Any] = _read(path)

    def known(self) -> dict[str, dict[str, Any]]:
        """Stored verdicts that hold for this device, MLX and kernels, by operation and shape."""
        prefix = f"{self._key('')}"
        found = ((key, value) for key, value in self._stored.items() if key.startswith(prefix))
        return {key.removeprefix(prefix): value for key, value in found}

    def matmul(self, shape: MatmulShape) -> Verdict:
        """Verdict for a matmul shape: stored, or measured now and stored."""
        stored = self._get(f"matmul {shape}")
        if stored is not None:
            return Verdict(**{**stored, "rows": frozenset(stored["rows"])})
        verdict = self._measure_matmul(shape)
        self._put(f"matmul {shape}", {**asdict(verdict), "rows": sorted(verdict.rows)})
        return verdict

    def attention(self, shape: AttentionShape) -> AttentionVerdict:
        """Verdict for an attention shape: stored, or measured now and stored."""
        stored = self._get(f"attention {shape}")
        if stored is not None:
            keys = {int(q): n for q, n in stored["min_keys"].items()}
            return AttentionVerdict(**{**stored, "min_keys": keys})
        verdict = self._measure_attention(shape)
        self._put(f"attention {shape}", asdict(verdict))
        return verdict

    def forwards(self, model: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What whole forwards of a model said: stored, or measured now and stored.

        Args:
            model: tells this model's shapes from others'.
            measure: times the forwards; plain values, for JSON.
        """
        stored = self._get(f"forward {model}")
        if stored is None:
            stored = measure()
            self._put(f"forward {model}", stored)
        return stored

    def shares(self, together: RowMatmul) -> bool:
        """Whether one launch for several weights gives the bits of one launch each; not stored."""
        singles = [RowMatmul(weight, self._where) for weight in together.weights]
        for rows in (1, MAX_ROWS[self._where]):
            x = mx.random.normal((rows, together.k), key=mx.random.key(rows)).astype(together.dtype)
            parts = together.launch(x, poison=True)
            for part, single in zip(parts, singles, strict=True):
                if not bool(mx.array_equal(part, single(x))):
                    return False
        return True

    def _key(self, what: str) -> str:
        return f"{self._prefix}|{'race' if self._race else 'check'}|{what}"

    def _get(self, what: str) -> dict[str, Any] | None:
        return self._stored.get(self._key(what))

    def _put(self, what: str, verdict: dict[str, Any]) -> None:
        self._stored[self._key(what)] = verdict
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {key: v for key, v in self._stored.items() if not _may_pass(v)}
            replace_file(self._path, json.dumps(kept, indent=1, sort_keys=True).encode())

    def _measure_matmul(self, shape: MatmulShape) -> Verdict:
        # A head of 150,000 outputs behaves like one of 16,384 and would cost gigabytes to try.
        shape = replace(shape, n=min(shape.n, TRIED_OUTPUTS))
        every = frozenset(range(1, MAX_ROWS[self._where] + 1))
        try:
            problem = matmul_problem(shape, self._where)
            if problem:
                return Verdict(False, frozenset(), None, problem)
            if not self._race:
                return Verdict(True, every, None, "correct; not raced")
            return race_matmul(shape, self._where)
        except (RuntimeError, ValueError, MemoryError) as error:
            return Verdict(False, frozenset(), None, why_not(error))

    def _measure_attention(self, shape: AttentionShape) -> AttentionVerdict:
        try:
            problem = attention_problem(shape, self._where)
            if problem:
                return AttentionVerdict(False, {}, problem)
            if not self._race:
                every = dict.fromkeys(range(1, MAX_ROWS[self._where] + 1), 1)
                return AttentionVerdict(True, every, "correct; not raced")
            return race_attention(shape, self._where)
        except (RuntimeError, ValueError, MemoryError) as error:
            return AttentionVerdict(False, {}, why_not(error))


def why_not(error: Exception) -> str:
    """The reason of a verdict where measuring broke off.

    Memory that was lacking may be there the next time: no file keeps such a one.
    """
    said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    lacks = isinstance(error, MemoryError) or any(word in said.lower() for word in _LACKS_MEMORY)
    return f"{_THIS_TIME if lacks else 'refused: '}{said}"


def _may_pass(verdict: dict[str, Any]) -> bool:
    return str(verdict.get("reason", "")).startswith(_THIS_TIME)


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # a damaged cache only costs a new measurement
        return {}
    return stored if isinstance(stored, dict) else {}
