"""Puts the matmul kernels into the layers of one model instance, and takes them out again.

A wrapped layer becomes an instance of a subclass of its own class with the same name; parameters,
paths and `isinstance` stay as they were, and other models of the same class are not touched. Knows
how MLX's linear and embedding layers hold their weights; knows no model family.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_kernels._build import ExactError
from spec_kernels.matmul import RowMatmul, Weight
from spec_kernels.prefill import wide_prefill_ops
from spec_kernels.whole import Arm

BASE = "_spec_base"
Serve = Callable[[mx.array], mx.array | None]
LINEAR = (nn.Linear, nn.QuantizedLinear)
EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass
class Switch:
    """The one place that says whether a model's kernels are in use.

    Attributes:
        most: rows of a matmul, and query positions, that the kernels serve.
        on: whether kernels serve at all; `turn_off` ends it.
        reason: why it is off.
        exact: a layer that cannot serve its kernel raises instead of falling back.
        fresh: a shape was met for the first time since the watchdog last looked, so that something
            may have been compiled.
        arms: by number of rows, which matmuls use the kernel: "stock" none, "raced" those whose
            shape won its race, "all" every one that has a kernel.
        calls: how often each kernel served, by operation and choice such as "matmul cuda".
        served: what each layer does with an input, by its shape; cleared when that changes.
        epoch: counts the changes of what serves, so that whoever kept a graph knows it is stale.
    """

    most: int
    on: bool = True
    reason: str = ""
    exact: bool = False
    fresh: bool = False
    arms: tuple[Arm, ...] = ()
    calls: Counter[str] = field(default_factory=Counter)
    served: list[dict[tuple[int, ...], Any] | set[tuple[int, ...]]] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.arms = self.arms or self.all_rows("raced")

    def all_rows(self, arm: Arm) -> tuple[Arm, ...]:
        """One arm for every number of rows."""
        return (arm,) * (self.most + 1)

    def use(self, arms: tuple[Arm, ...]) -> None:
        """Choose by number of rows from now on."""
        self.arms = arms
        self.forget()

    def turn_off(self, reason: str) -> None:
        """Leave everything to MLX from now on."""
        self.on, self.reason = False, reason
        self.forget()

    def forget(self) -> None:
        """Something else serves from now on: every layer decides anew."""
        self.epoch += 1
        for served in self.served:
            served.clear()


def weight_of(layer: nn.Module) -> Weight | None:
    """The layer's weight, or None if it is none of MLX's linear and embedding layers."""
    if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return Weight(
            layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits
        )
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        return Weight(layer["weight"], None, None, 64, 16)
    return None


class Shared:
    """One launch for sibling layers that are called with the same input, such as q, k and v.

    The first sibling computes for all; the others take their part if they get the same array
    object. Once each has, nothing is held back.

    Args:
        matmul: bound to the siblings' weights.
    """

    def __init__(self, matmul: RowMatmul) -> None:
        self._matmul = matmul
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def part(self, x: mx.array, index: int) -> mx.array:
        """Product of `x` with weight number `index`."""
        if x is not self._input or index not in self._parts:
            launch, _ = self._matmul.bound(x.shape)
            self._input, self._parts = x, dict(enumerate(launch(x)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class LinearKernel:
    """What a wrapped linear layer does with its input before its own code sees it.

    At one row this is a share of a whole forward, so what the shape decides is decided once.

    Args:
        matmul: the kernel bound to the layer's weight.
        rows: the row counts the kernel serves outside exact mode.
        wide_from: rows from which to dequantise first, or None.
        switch: shared by all layers of the model.
        where: name of the kernel's backend, for the statistics.
    """

    def __init__(
        self,
        matmul: RowMatmul,
        rows: frozenset[int],
        wide_from: int | None,
        switch: Switch,
        where: str,
    ) -> None:
        self._matmul, self._switch, self._wide_from = matmul, switch, wide_from
        self._wins = [row in rows for row in range(switch.most + 1)]
        self._where = where
        self._shared: tuple[Shared, int] | None = None
        self._alike = False
        self._served: dict[tuple[int, ...], Serve] = {}
        switch.served.append(self._served)

    @property
    def serves(self) -> bool:
        """Whether any input still goes to the kernel."""
        arms = self._switch.arms
        used = ("all" in arms) or any(
            won and arm == "raced" for won, arm in zip(self._wins, arms, strict=True)
        )
        return used or self._wide_from is not None

    def share(self, shared: Shared, index: int, alike: bool) -> None:
        """Compute as number `index` of siblings from now on, where all of them use the kernel.

        Args:
            shared: the launch of the siblings.
            index: this layer's number among them.
            alike: whether the same row counts won for each of them.
        """
        self._shared, self._alike = (shared, index), alike

    def serving(self, x: mx.array) -> Serve:
        """What gives the product without the layer's bias, or None if stock MLX shall do it."""
        return self._served.get(x.shape) or self._choose(x)

    def _choose(self, x: mx.array) -> Serve:
        """How inputs of this shape are served until the switch changes."""
        switch, shape, rows = self._switch, x.shape, x.size // x.shape[-1]
        if not switch.on:
            self._require_inexact(x, f"off: {switch.reason}")
            return _stock
        switch.fresh = True
        serve, final = _stock, True
        if rows <= switch.most:
            arm = switch.arms[rows]
            if arm == "all" or (arm == "raced" and self._wins[rows]):
                serve, final = self._by_kernel(shape, together=arm == "all" or self._alike)
        elif switch.exact and shape[-2] <= switch.most:
            serve = self._counted(self._in_slices, self._where)
        elif self._wide_from is not None and rows >= self._wide_from:
            weight = self._matmul.weight
            serve = self._counted(lambda x: wide_prefill_ops(x, weight), "wide")
        if final:
            self._served[shape] = serve
        return serve

    def _by_kernel(self, shape: tuple[int, ...], *, together: bool) -> tuple[Serve, bool]:
        """The kernel, alone or with the siblings, and whether its launch is final."""
        launch, final = self._matmul.bound(shape)
        if self._shared is not None and together:
            shared, index = self._shared
            return self._counted(lambda x: shared.part(x, index), self._where), True
        return self._counted(lambda x: launch(x)[0], self._where), final

    def _counted(self, multiply: Callable[[mx.array], mx.array], how: str) -> Serve:
        """`multiply` with its calls counted, for inputs of the weight's dtype."""
        calls, name, dtype = self._switch.calls, f"matmul {how}", self._matmul.dtype

        def serve(x: mx.array) -> mx.array | None:
            if x.dtype != dtype:
                self._require_inexact(x, f"{x.dtype}, and the kernel serves {dtype}")
                return None
            calls[name] += 1
            return multiply(x)

        return serve

    def _require_inexact(self, x: mx.array, found: str) -> None:
        if self._switch.exact and x.shape[-2] <= self._switch.most:
            raise ExactError(f"[exact] matmul must use its kernel, got {found}.")

    def _in_slices(self, x: mx.array) -> mx.array:
        """A batch of short blocks in exact mode: as many rows at a time as the kernel serves."""
        flat, most = x.reshape(-1, x.shape[-1]), self._switch.most
        parts = [self._matmul(flat[i : i + most]) for i in range(0, flat.shape[0], most)]
        return mx.concatenate(parts).reshape(*x.shape[:-1], self._matmul.n)


def _stock(x: mx.array) -> None:
    """Leave the product to MLX."""


@functools.cache
def _linear_class(base: type) -> type:
    def call(self: Any, x: mx.array) -> mx.array:
        serve = self._spec_kernel.serving(x)
        y = None if serve is _stock else serve(x)
        if y is None:
            return base.__call__(self, x)
        return y + self["bias"] if "bias" in self else y

    return type(base.__name__, (base,), {"__call__": call, BASE: base})


@functools.cache
def _embedding_class(base: type) -> type:
    def as_linear(self: Any, x: mx.array) -> mx.array:
        y = self._spec_kernel.serving(x)(x)
        return base.as_linear(self, x) if y is None else y

    return type(base.__name__, (base,), {"as_linear": as_linear, BASE: base})


def wrap_linear(layer: nn.Module, kernel: LinearKernel) -> None:
    """Send a linear layer's product, or an embedding's `as_linear`, through `kernel` first."""
    base = type(layer)
    wrapped = _embedding_class(base) if isinstance(layer, EMBEDDING) else _linear_class(base)
    object.__setattr__(layer, "__class__", wrapped)
    object.__setattr__(layer, "_spec_kernel", kernel)


def unwrap(layer: nn.Module) -> None:
    """Undo `wrap_linear` or `wrap_attention`."""
    base: type = getattr(type(layer), BASE)
    object.__setattr__(layer, "__class__", base)
    layer.__dict__.pop("_spec_kernel", None)
