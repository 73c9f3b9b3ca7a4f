"""What is installed in one model: its state, its watchdog, and the way out.

Knows which layers were wrapped, not how they were chosen.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.nn as nn

from spec_kernels.attention_layers import AttentionKernel
from spec_kernels.gate import Gate, why_not
from spec_kernels.hardware import Device
from spec_kernels.layers import LinearKernel, Switch, unwrap
from spec_kernels.race import raced_rows
from spec_kernels.watchdog import Watchdog
from spec_kernels.whole import (
    Arm,
    Forward,
    SingleRace,
    best_arms,
    race_forwards,
    replays_win,
)


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
        self,
        switch: Switch,
        device: Device,
        reason: str,
        ops: list[OpState],
        layers: list[nn.Module],
        attentions: Sequence[AttentionKernel] = (),
        gate: Gate | None = None,
    ) -> None:
        self._switch, self._device, self._reason = switch, device, reason
        self._ops, self._layers, self._attentions = tuple(ops), layers, attentions
        self._gate = gate
        self._forward_ms: dict[str, dict[str, float]] = {}
        self._watchdog = Watchdog()

    @property
    def max_rows(self) -> int | None:
        """Rows up to which exact mode holds; None where nothing limits them."""
        return self._switch.most if self._switch.exact and self._layers else None

    @property
    def epoch(self) -> int:
        """Changes with what serves; a graph that was kept from an earlier one is stale."""
        return self._switch.epoch

    def least_keys(self, n_queries: int) -> int | None:
        """From how many keys every attention layer can read whole buffers.

        Args:
            n_queries: query positions.

        Returns:
            A number of keys, or None where a buffer must be cut to the keys it holds: without the
            kernel, or where stock attention was faster.
        """
        least = [attention.least_keys(n_queries) for attention in self._attentions]
        if self._device.backend != "cuda" or not least or None in least or not self._layers:
            return None
        return max(n for n in least if n is not None)

    def reads_ragged(self, n_queries: int) -> bool:
        """Whether every attention layer can read whole buffers of several sequences.

        Each sequence of a batch may hold another number of keys, at the start of its buffers. Not
        in exact mode, whose matmuls are held to fewer rows than a batch may have.

        Args:
            n_queries: query positions of each sequence.
        """
        kernels = self._attentions if self._layers else ()
        return bool(kernels) and all(kernel.reads_ragged(n_queries) for kernel in kernels)

    @contextmanager
    def tracing(self) -> Iterator[Counter[str]]:
        """A model is being traced: yields what a run of the trace counts, once the block is over.

        The watchdog leaves this round out.
        """
        before, traced = Counter(self._switch.calls), Counter[str]()
        try:
            yield traced
        finally:
            traced.update(self._switch.calls - before)
            self._switch.calls.clear()
            self._switch.calls.update(before)
            self._switch.fresh = True

    def count(self, calls: Mapping[str, int]) -> None:
        """Add the calls of a trace that has run again."""
        self._switch.calls.update(calls)

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

    def race(self, forward: Forward) -> None:
        """Let whole forwards decide, by number of rows, which matmuls use their kernels.

        Layers that serve nothing afterwards get their own class back.

        Args:
            forward: see `race_forwards`.
        """
        assert self._gate is not None

        def measure() -> dict[str, Any]:
            switch = self._switch
            seconds = race_forwards(
                forward, lambda arm: switch.use(switch.all_rows(arm)), raced_rows(switch.most)
            )
            ms = {
                str(n): {a: round(1e3 * s, 3) for a, s in by.items()} for n, by in seconds.items()
            }
            return {"arms": best_arms(seconds), "ms": ms}

        outcome = self._gate.forwards(self._shapes(), measure)
        arms: list[Arm] = outcome["arms"]
        self._forward_ms = outcome["ms"]
        self._switch.use(tuple(arms))
        self._switch.calls.clear()
        idle = [layer for layer in self._layers if not _serves(layer)]
        self._layers = [layer for layer in self._layers if _serves(layer)]
        for layer in idle:
            unwrap(layer)

    def race_single(self, model: str, measure: SingleRace) -> None:
        """Let whole forwards of one row decide whether the kernel attends for one query.

        By itself it usually loses that. But a forward whose attention is the kernel's can be
        replayed as a graph (`least_keys`), and the host sets the pace of single rows. On CUDA,
        outside exact mode, where the kernel is right. The outcome is kept. Whatever goes wrong
        while it is measured leaves the model as it was.

        Args:
            model: tells models apart whose shapes are alike.
            measure: seconds of one row by depth of the context and arm, "own" and "replayed"; empty
                where a forward cannot be replayed. It is given a function that lets the kernel
                attend for one query, or not; at first it does not.
        """
        if self._gate is None or not self.reads_ragged(1) or self.least_keys(1) == 1:
            return

        def use(kernel: bool) -> None:
            for attention in self._attentions:
                attention.serve_single(kernel)
            self._switch.forget()

        def measured() -> dict[str, Any]:
            reason, seconds = "whole forwards of one row cannot be replayed", {}
            try:
                with self.tracing():
                    seconds = measure(use)
            except Exception as error:  # a model's own code fails in any way, and so may memory
                reason = why_not(error)
            finally:
                use(False)
            won = replays_win(seconds)
            if seconds:
                reason = f"whole forwards, replayed, were {'' if won else 'not '}faster"
            ms = {n: {a: round(1e3 * s, 3) for a, s in by.items()} for n, by in seconds.items()}
            return {"won": won, "reason": reason, "ms": {str(n): by for n, by in ms.items()}}

        outcome = self._gate.forwards(f"single {self._shapes(model)}", measured)
        if outcome["won"]:
            use(True)
        self._ops = tuple(self._with_single(op, outcome) for op in self._ops)

    def _with_single(self, op: OpState, outcome: dict[str, Any]) -> OpState:
        """The state of attention after the race of single rows."""
        if op.op != "attention":
            return op
        served = [n for n in range(1, self._switch.most + 1) if self.least_keys(n) is not None]
        ratios = {n: round(by["own"] / by["replayed"], 3) for n, by in outcome["ms"].items()}
        return replace(
            op,
            kernel=self._device.backend if served else op.kernel,
            serves=span(served),
            reason=f"{op.reason}; one query: {outcome['reason']}",
            speedup={**op.speedup, **{f"forward 1@{n}": ratio for n, ratio in ratios.items()}},
        )

    def _shapes(self, model: str = "") -> str:
        """A short name for the model's shapes and what won on them."""
        shapes = sorted(f"{op.op} {op.shape} {op.layers} {op.serves}" for op in self._ops)
        return hashlib.sha256("; ".join([*shapes, model]).encode()).hexdigest()[:16]

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
