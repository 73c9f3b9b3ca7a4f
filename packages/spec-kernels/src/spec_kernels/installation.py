"""Kernels for one model instance: install, state, off switch, uninstall.

Works on any `mlx.nn.Module`; knows linear layers, embeddings used as heads, and attention layers
that call a function named `scaled_dot_product_attention`. Knows no model family and no cache
class.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from spec_kernels._build import MAX_ROWS, ExactError
from spec_kernels.attention_layers import AttentionKernel, attention_function, wrap_attention
from spec_kernels.exact import require_row_invariant
from spec_kernels.gate import AttentionShape, Gate, MatmulShape
from spec_kernels.hardware import Device, Rule, rule_for, this_device
from spec_kernels.installed import Installed, OpState, span
from spec_kernels.layers import (
    EMBEDDING,
    LINEAR,
    LinearKernel,
    Shared,
    Switch,
    unwrap,
    weight_of,
    wrap_linear,
)
from spec_kernels.matmul import RowMatmul, Weight, alike, unsupported
from spec_kernels.whole import Forward

Mode = Literal["auto", "on", "off"]
ATTENTION_NAME = "scaled_dot_product_attention"
# Layers of one parent that models call with one input; on CUDA they are computed in one launch.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        mode: "auto" obeys the hardware rules and races every shape against stock MLX; on a CUDA
            device that they leave out it only keeps blocks from cuDNN, by plain operations. "on"
            overrides the rules, not the race; "off" installs nothing.
        exact: use the kernels for every row count they can serve, so that a row's bits do not
            depend on the rows beside it, or refuse. On a CPU there is nothing to install, but it
            is checked.
        cache: file in which verdicts are kept; None measures again in every process.
        attention_shape: (heads, heads of the cache, head dimension). None leaves attention alone,
            unless `exact` is asked for. About one query whole forwards may have the last word:
            `Installed.race_single`.
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
    switch = Switch(MAX_ROWS[device.backend], exact=exact)
    if not rule.allowed and (device.backend != "cuda" or mode == "off"):
        return Installed(switch, device, rule.reason, [], [])
    gate = Gate(device, cache, race=not exact)
    installer = _Installer(gate, switch, device, every=forward is not None and not exact)
    if not rule.allowed:
        switch.turn_off(rule.reason)
        installer.plain_attentions(model)
        return Installed(switch, device, rule.reason, [], installer.wrapped)
    try:
        installer.matmuls(model)
        if device.backend == "cuda":
            installer.siblings(model)
        if exact or attention_shape is not None:
            installer.attentions(model, attention_shape)
        installed = Installed(
            switch,
            device,
            rule.reason,
            installer.states(),
            installer.wrapped,
            list(installer.attending.values()),
            gate,
        )
        if forward is not None and not exact and installer.wrapped:
            installed.race(forward)
    except BaseException:
        installer.undo()
        raise
    return installed


class _Installer:
    def __init__(self, gate: Gate, switch: Switch, device: Device, *, every: bool) -> None:
        self._gate, self._switch, self._where = gate, switch, device.backend
        self._every = every
        self.wrapped: list[nn.Module] = []
        self.attending: dict[Callable[..., mx.array], AttentionKernel] = {}
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
        rows = frozenset(range(1, self._switch.most + 1)) if self._switch.exact else verdict.rows
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
        min_keys, state, raced = self._attention_verdict(heads)
        for _ in range(self._wrap_attentions(model, min_keys, raced=raced)):
            self._note(state)

    def plain_attentions(self, model: nn.Module) -> None:
        """Leave a few queries to plain operations: cuDNN would plan anew for every length."""
        self._wrap_attentions(model, {}, raced=False)

    def _wrap_attentions(self, model: nn.Module, min_keys: dict[int, int], *, raced: bool) -> int:
        n_layers = 0
        for _, layer in model.named_modules():
            original = attention_function(layer, ATTENTION_NAME)
            if original is None or isinstance(layer, LINEAR):
                continue
            n_layers += 1
            if original not in self.attending:
                self.attending[original] = AttentionKernel(
                    original, min_keys, self._switch, self._where, raced=raced
                )
            if min_keys or self._switch.exact or self._where == "cuda":
                wrap_attention(layer, ATTENTION_NAME, self.attending[original])
                self.wrapped.append(layer)
        return n_layers

    def _attention_verdict(
        self, heads: tuple[int, int, int] | None
    ) -> tuple[dict[int, int], OpState, bool]:
        if heads is None:
            everywhere = dict.fromkeys(range(1, self._switch.most + 1), 1)
            state = OpState("attention", "any", 0, self._where, span(everywhere), "exact")
            return everywhere, state, False
        shape = AttentionShape(*heads, "bfloat16")
        verdict = self._gate.attention(shape)
        if self._switch.exact and not verdict.correct:
            raise ExactError(f"[exact] attention of {shape} failed its check: {verdict.reason}.")
        kernel = self._where if verdict.min_keys or self._switch.exact else "stock"
        every = range(1, self._switch.most + 1)
        serves = span(every if self._switch.exact else verdict.min_keys)
        state = OpState("attention", str(shape), 0, kernel, serves, verdict.reason, verdict.speedup)
        return verdict.min_keys, state, verdict.correct
