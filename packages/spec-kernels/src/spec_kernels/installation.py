"""Kernels for one model instance: install, state, off switch, uninstall.

Works on any `mlx.nn.Module`; knows linear layers, embeddings used as heads, and attention layers
that call a function named `scaled_dot_product_attention`. Knows no model family and no cache
class.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from spec_kernels._build import ExactError
from spec_kernels.attention import MAX_QUERIES
from spec_kernels.exact import require_row_invariant
from spec_kernels.gate import AttentionShape, Gate, MatmulShape
from spec_kernels.hardware import Device, Rule, rule_for, this_device
from spec_kernels.layers import (
    EMBEDDING,
    LINEAR,
    AttentionKernel,
    LinearKernel,
    Shared,
    Switch,
    attention_function,
    unwrap,
    weight_of,
    wrap_attention,
    wrap_linear,
)
from spec_kernels.matmul import MAX_ROWS, RowMatmul, Weight, alike, unsupported
from spec_kernels.watchdog import Watchdog
from spec_kernels.whole import Arm, Forward, best_arms, race_forwards

Mode = Literal["auto", "on", "off"]
ATTENTION_NAME = "scaled_dot_product_attention"
# Layers of one parent that models call with one input; on CUDA they are computed in one launch.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class OpState:
    """State of the kernels for one operation and shape.

    Attributes:
        op: "matmul" or "attention".
        shape: for people, such as "4096x12288 4-bit g64 bfloat16".
        layers: how many layers of the model have it.
        kernel: "metal", "cuda" or "stock".
        serves: row counts or query positions the kernel serves, such as "1-16"; empty if none.
        reason: why.
        speedup: measured stock time over kernel time by number of rows; empty if not raced.
    """

    op: str
    shape: str
    layers: int
    kernel: str
    serves: str
    reason: str
    speedup: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """State of the kernels of one model: what `spec doctor` and the statistics show.

    Attributes:
        device: where the model runs.
        on: whether any kernel is in use.
        exact: whether a row's bits are independent of its neighbours on this model.
        reason: why the kernels are on or off as a whole.
        ops: one entry per operation and shape.
        arms: row counts by what their matmuls use ("raced": shapes that won; "all": every shape).
        forward_ms: whole forwards of the model by rows and arm; empty if they were not raced.
        calls: how often each kernel served since installation.
    """

    device: Device
    on: bool
    exact: bool
    reason: str
    ops: tuple[OpState, ...]
    arms: dict[str, str]
    forward_ms: dict[str, dict[str, float]]
    calls: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)


def span(numbers: Any) -> str:
    """Numbers as ranges: 1, 2, 3, 8 -> "1-3, 8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


class Installed:
    """Kernels in one model. A context manager: leaving it uninstalls.

    Use `install`; this class is what it returns.
    """

    def __init__(
        self, switch: Switch, device: Device, reason: str, ops: list[OpState], layers: list
    ) -> None:
        self._switch, self._device, self._reason = switch, device, reason
        self._ops, self._layers = tuple(ops), layers
        self._forward_ms: dict[str, dict[str, float]] = {}
        self._watchdog = Watchdog()

    @property
    def max_rows(self) -> int | None:
        """Rows up to which exact mode holds; None where nothing limits them."""
        return MAX_ROWS if self._switch.exact and self._layers else None

    def report(self) -> Report:
        """State now."""
        arms: dict[str, list[int]] = {}
        for rows, arm in enumerate(self._switch.arms):
            if rows and self._ops:
                arms.setdefault(arm, []).append(rows)
        return Report(
            device=self._device,
            on=self._switch.on and bool(self._layers),
            exact=self._switch.exact,
            reason=self._reason if self._switch.on else self._switch.reason,
            ops=self._ops,
            arms={arm: span(rows) for arm, rows in arms.items()},
            forward_ms=self._forward_ms,
            calls=dict(self._switch.calls),
        )

    def race(self, forward: Forward, gate: Gate) -> None:
        """Let whole forwards decide, by number of rows, which matmuls use their kernels.

        Layers that serve nothing afterwards get their own class back.

        Args:
            forward: see `race_forwards`.
            gate: keeps the outcome.
        """

        def measure() -> dict[str, Any]:
            seconds = race_forwards(forward, lambda arm: self._switch.use((arm,) * (MAX_ROWS + 1)))
            ms = {
                str(n): {a: round(1e3 * s, 3) for a, s in by.items()} for n, by in seconds.items()
            }
            return {"arms": best_arms(seconds), "ms": ms}

        shapes = sorted(f"{op.op} {op.shape} {op.layers} {op.serves}" for op in self._ops)
        outcome = gate.forwards(
            hashlib.sha256("; ".join(shapes).encode()).hexdigest()[:16], measure
        )
        arms: list[Arm] = outcome["arms"]
        self._forward_ms = outcome["ms"]
        self._switch.use(tuple(arms))
        self._switch.calls.clear()
        idle = [layer for layer in self._layers if not _serves(layer)]
        self._layers = [layer for layer in self._layers if _serves(layer)]
        for layer in idle:
            unwrap(layer)

    def observe(self, seconds: float) -> None:
        """Tell the watchdog how long one verify took; a stall turns the kernels off.

        The first verify of a width is left out: it may have compiled something.

        Args:
            seconds: wall time of one verify until its result was on the host.
        """
        if self._switch.fresh:
            self._switch.fresh = False
            return
        stalled = self._watchdog.observe(seconds)
        if stalled and self._switch.on:
            self.disable(stalled)

    def disable(self, reason: str) -> None:
        """Turn the kernels off for the rest of this model's life.

        In exact mode the next call raises.
        """
        self._switch.turn_off(reason)

    def uninstall(self) -> None:
        """Give every layer its own class back. Doing it twice does no harm."""
        while self._layers:
            unwrap(self._layers.pop())

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def _serves(layer: nn.Module) -> bool:
    """Whether a wrapped layer's kernel still serves anything; attention was raced by itself."""
    kernel = getattr(layer, "_spec_kernel", None)
    return not isinstance(kernel, LinearKernel) or kernel.serves


def install(
    model: nn.Module,
    *,
    mode: Mode = "auto",
    exact: bool = False,
    cache: Path | None = None,
    attention_shape: tuple[int, int, int] | None = None,
    forward: Forward | None = None,
) -> Installed:
    """Put the kernels that pay into one model.

    Args:
        model: the model; its layers are changed in place, other instances are not.
        mode: "auto" obeys the hardware rules and races every shape against stock MLX; "on"
            overrides the rules, not the race; "off" installs nothing.
        exact: use the kernels for every row count they can serve, so that a row's bits do not
            depend on the rows beside it, or refuse. On a CPU there is nothing to install, but it
            is checked.
        cache: file in which verdicts are kept; None measures again in every process.
        attention_shape: (heads, heads of the cache, head dimension). None leaves attention alone,
            unless `exact` is asked for.
        forward: runs this model on so many rows until the result is on the host. Given it, whole
            forwards have the last word on the matmuls; without it each shape's own race has.

    Returns:
        The installed kernels: state, watchdog and `uninstall`.

    Raises:
        ExactError: `exact` was asked for and some operation of the model cannot give it.
    """
    device = this_device()
    rule = Rule(False, "turned off") if mode == "off" else rule_for(device)
    if mode == "on" and device.backend != "cpu":
        rule = Rule(
            True, f"asked for, although: {rule.reason}" if not rule.allowed else rule.reason
        )
    if exact:
        if device.backend != "cpu" and not rule.allowed:
            raise ExactError(f"[exact] The kernels must be on, got: {rule.reason}.")
        require_row_invariant(model, device.backend, ATTENTION_NAME)
    if mode == "auto" and not exact and rule.allowed and not rule.measured:
        rule = Rule(False, f"{rule.reason}, but not measured yet; ask for them to race them here")
    switch = Switch(exact=exact)
    if not rule.allowed:
        return Installed(switch, device, rule.reason, [], [])
    gate = Gate(device, cache, race=not exact)
    installer = _Installer(gate, switch, device, every=forward is not None and not exact)
    try:
        installer.matmuls(model)
        if device.backend == "cuda":
            installer.siblings(model)
        if exact or attention_shape is not None:
            installer.attentions(model, attention_shape)
        installed = Installed(switch, device, rule.reason, installer.states(), installer.wrapped)
        if forward is not None and not exact and installer.wrapped:
            installed.race(forward, gate)
    except BaseException:
        installer.undo()
        raise
    return installed


class _Installer:
    def __init__(self, gate: Gate, switch: Switch, device: Device, *, every: bool) -> None:
        self._gate, self._switch, self._where = gate, switch, device.backend
        self._every = every
        self.wrapped: list[nn.Module] = []
        self._states: dict[str, OpState] = {}
        self._layers: Counter[str] = Counter()
        self._kernels: dict[int, tuple[LinearKernel, Weight, frozenset[int]]] = {}
        self._sharing: dict[tuple, bool] = {}

    def undo(self) -> None:
        while self.wrapped:
            unwrap(self.wrapped.pop())

    def states(self) -> list[OpState]:
        plain = [asdict(state) for state in self._states.values()]
        return [OpState(**{**s, "layers": self._layers[s["op"] + s["shape"]]}) for s in plain]

    def _note(self, state: OpState) -> None:
        key = state.op + state.shape
        self._states[key] = state
        self._layers[key] += 1

    def matmuls(self, model: nn.Module) -> None:
        weights = [(layer, weight_of(layer)) for _, layer in model.named_modules()]
        heads = {(w.n, w.k) for layer, w in weights if w and not isinstance(layer, EMBEDDING)}
        for layer, weight in weights:
            # An embedding is a head too, unless the model has a head of that shape.
            if weight is None or (isinstance(layer, EMBEDDING) and (weight.n, weight.k) in heads):
                continue
            self._matmul(layer, weight)

    def _matmul(self, layer: nn.Module, weight: Weight) -> None:
        mode = getattr(layer, "mode", "affine")
        shape = MatmulShape(weight.n, weight.k, weight.bits, weight.group_size, str(weight.dtype))
        reason = f"mode {mode}" if mode != "affine" else unsupported(weight, self._where)
        if reason:
            if self._switch.exact:
                raise ExactError(f"[exact] matmul of {shape} must have a kernel, got: {reason}.")
            self._note(OpState("matmul", str(shape), 0, "stock", "", reason))
            return
        verdict = self._gate.matmul(shape)
        if self._switch.exact and not verdict.correct:
            raise ExactError(f"[exact] matmul of {shape} failed its check: {verdict.reason}.")
        rows = frozenset(range(1, MAX_ROWS + 1)) if self._switch.exact else verdict.rows
        kernel = self._where if rows else "stock"
        self._note(
            OpState("matmul", str(shape), 0, kernel, span(rows), verdict.reason, verdict.speedup)
        )
        if rows or verdict.wide_from is not None or (self._every and verdict.correct):
            matmul = RowMatmul(weight, self._where)
            wide = None if self._switch.exact else verdict.wide_from
            kernel = LinearKernel(matmul, rows, wide, self._switch, self._where)
            wrap_linear(layer, kernel)
            self.wrapped.append(layer)
            if rows or self._every:
                self._kernels[id(layer)] = (kernel, weight, rows)

    def siblings(self, model: nn.Module) -> None:
        """Let wrapped layers that share an input share a launch, where that changes no bit."""
        for _, parent in model.named_modules():
            for names in SIBLINGS:
                family = [self._kernels.get(id(parent.get(name))) for name in names]
                known = [member for member in family if member is not None]
                alike = len({rows for _, _, rows in known}) == 1
                if len(known) == len(names) and (alike or self._every):
                    self._share([(kernel, weight) for kernel, weight, _ in known], alike)

    def _share(self, family: list[tuple[LinearKernel, Weight]], same_rows: bool) -> None:
        weights = [weight for _, weight in family]
        if not alike(weights):
            return
        together = RowMatmul(weights, self._where)
        key = (weights[0].k, weights[0].bits, *(weight.n for weight in weights))
        if key not in self._sharing:
            self._sharing[key] = self._gate.shares(together)
        if self._sharing[key]:
            shared = Shared(together)
            for index, (kernel, _) in enumerate(family):
                kernel.share(shared, index, same_rows)

    def attentions(self, model: nn.Module, heads: tuple[int, int, int] | None) -> None:
        kernels: dict[Callable[..., mx.array], AttentionKernel] = {}
        min_keys, state, raced = self._attention_verdict(heads)
        for _, layer in model.named_modules():
            original = attention_function(layer, ATTENTION_NAME)
            if original is None or isinstance(layer, LINEAR):
                continue
            if original not in kernels:
                kernels[original] = AttentionKernel(
                    original, min_keys, self._switch, self._where, raced=raced
                )
            self._note(state)
            if min_keys or self._switch.exact or self._where == "cuda":
                wrap_attention(layer, ATTENTION_NAME, kernels[original])
                self.wrapped.append(layer)

    def _attention_verdict(
        self, heads: tuple[int, int, int] | None
    ) -> tuple[dict[int, int], OpState, bool]:
        if heads is None:
            everywhere = dict.fromkeys(range(1, MAX_QUERIES + 1), 1)
            state = OpState("attention", "any", 0, self._where, "1-16", "exact")
            return everywhere, state, False
        shape = AttentionShape(*heads, "bfloat16")
        verdict = self._gate.attention(shape)
        if self._switch.exact and not verdict.correct:
            raise ExactError(f"[exact] attention of {shape} failed its check: {verdict.reason}.")
        kernel = self._where if verdict.min_keys or self._switch.exact else "stock"
        serves = span(verdict.min_keys) if not self._switch.exact else "1-16"
        state = OpState("attention", str(shape), 0, kernel, serves, verdict.reason, verdict.speedup)
        return verdict.min_keys, state, verdict.correct
