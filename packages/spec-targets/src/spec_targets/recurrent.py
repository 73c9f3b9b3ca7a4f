"""Recurrent layers that can take rows back: capture a block's inputs, run the recurrence again.

A recurrent state cannot be trimmed. While a block is open, its layer notes what entered the
convolution and the recurrence; to keep the first rows of the block, the convolution window is cut
out of the noted rows, and the recurrence alone runs again from the state before the block. Nothing
else of the model is computed twice. Where a recurrence runs row by row anyway, the state after the
kept rows was there already and is picked.

Covers gated DeltaNet and its vector-gated kin, Mamba-2, and short convolutions. For any other
recurrence its whole layer runs again on the kept rows, which costs the layer's projections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import (
    compute_g,
    compute_lower_bound_g,
    gated_delta_ops,
    gated_delta_update,
)
from mlx_lm.models.ssm import ssm_update

from spec_targets.swap import Swaps, rebind

_MOST_STATE_BYTES = 64 * 2**20  # states of one layer that are held while a block is open


Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A function of mlx-lm that carries a state over rows: (...) -> (outputs, state).

    Attributes:
        function: What the model classes call.
        rows: Names of arguments of shape (B, T, ..), one row per token.
        by_rows: The same one row at a time: outputs (B, T, ..) and the state after every row.
        takes_rows: Whether an open block goes through `by_rows` on this machine.
    """

    function: Callable[..., tuple[mx.array, mx.array]]
    rows: tuple[str, ...]
    by_rows: Callable[[Arguments, "Recurrence"], tuple[mx.array, list[mx.array]]]
    takes_rows: Callable[[], bool]

    def run(self, arguments: Arguments) -> tuple[mx.array, list[mx.array]]:
        """Outputs (B, T, ..) and the states after each row, or the last one alone."""
        if arguments[self.rows[0]].shape[1] > 1 and self.takes_rows():
            return self.by_rows(arguments, self)
        output, state = self.function(**arguments)
        return output, [state]

    def state_after(self, arguments: Arguments, n_rows: int) -> mx.array:
        """The state after the first `n_rows` rows, computed again."""
        return self.run(self.cut(arguments, 0, n_rows))[1][-1]

    def cut(self, arguments: Arguments, start: int, end: int) -> Arguments:
        """Arguments for some of the rows."""
        names = self.rows if arguments.get("mask") is None else (*self.rows, "mask")
        return {**arguments, **{name: arguments[name][:, start:end] for name in names}}


def _mamba2_by_rows(
    arguments: Arguments, recurrence: Recurrence
) -> tuple[mx.array, list[mx.array]]:
    """Calls with one row each, as in plain decoding."""
    outputs: list[mx.array] = []
    states: list[mx.array] = [arguments["state"]]
    for row in range(arguments["hidden_states"].shape[1]):
        one = {**recurrence.cut(arguments, row, row + 1), "state": states[-1]}
        output, state = recurrence.function(**one)
        outputs.append(output)
        states.append(state)
    return mx.concatenate(outputs, axis=1), states[1:]


def _gated_delta_by_rows(
    arguments: Arguments, recurrence: Recurrence
) -> tuple[mx.array, list[mx.array]]:
    """The gates for all rows at once, then the library's operations row by row."""
    q, k, v, a, b = (arguments[name] for name in recurrence.rows)
    beta = mx.sigmoid(b)
    if arguments.get("allow_neg_eigval"):
        beta = 2.0 * beta
    bound = arguments.get("lower_bound")
    if bound is None:
        g = compute_g(arguments["A_log"], a, arguments["dt_bias"])
    else:
        g = compute_lower_bound_g(arguments["A_log"], a, arguments["dt_bias"], bound)
    copies = v.shape[2] // k.shape[2]  # value heads per key head
    if copies > 1:
        q, k = mx.repeat(q, copies, -2), mx.repeat(k, copies, -2)
    mask, state = arguments.get("mask"), arguments.get("state")
    outputs: list[mx.array] = []
    states: list[mx.array] = []
    for row in range(v.shape[1]):
        at = slice(row, row + 1)
        seen = None if mask is None else mask[:, at]
        output, state = gated_delta_ops(
            q[:, at], k[:, at], v[:, at], g[:, at], beta[:, at], state, seen
        )
        outputs.append(output)
        states.append(state)
    return mx.concatenate(outputs, axis=1), states


# One Metal kernel runs all rows and keeps the state in registers; elsewhere each row is its own
# handful of operations, and the states between them are there anyway.
GATED_DELTA = Recurrence(
    gated_delta_update,
    rows=("q", "k", "v", "a", "b"),
    by_rows=_gated_delta_by_rows,
    takes_rows=lambda: not mx.metal.is_available(),
)
# The library's chunked form rounds differently from its one-row form, which plain decoding takes.
MAMBA2 = Recurrence(
    ssm_update,
    rows=("hidden_states", "B", "C", "dt"),
    by_rows=_mamba2_by_rows,
    takes_rows=lambda: True,
)


class RecurrentCache(ArraysCache):
    """State of one recurrent layer: convolution windows first, then the recurrence's state.

    Arrays in the slots are rebound and never written to, so the state before a block is kept by
    keeping the list.
    """

    cache: list[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, n_slots: int) -> None:
        super().__init__(n_slots)
        self._before: list[mx.array | None] | None = None
        self._windows: list[tuple[mx.array, int]] = []
        self._state_after: Callable[[int], mx.array] | None = None
        self._run_layer: Callable[[int], Any] | None = None

    @property
    def is_open(self) -> bool:
        """True while a block's inputs are noted."""
        return self._before is not None

    def open(self) -> None:
        """Remember the state and note what the next rows feed in."""
        self._before = list(self.cache)
        self._windows, self._state_after, self._run_layer = [], None, None

    def note_window(self, rows: mx.array, n_before: int) -> None:
        """A convolution reads `rows` (B, n_before + T, C): the old window, then the block."""
        self._windows.append((rows, n_before))

    def note_recurrence(self, state_after: Callable[[int], mx.array]) -> None:
        """A recurrence ran; `state_after(n)` gives its state after the block's first n rows."""
        self._state_after = state_after

    def note_layer(self, run: Callable[[int], Any]) -> None:
        """A layer ran; `run(n)` runs it again on the block's first n rows, from these slots."""
        self._run_layer = run

    def keep(self, n_rows: int, n_keep: int) -> None:
        """Close the block of `n_rows` rows; the slots become what the first `n_keep` lead to."""
        slots = self._slots_after(n_rows, n_keep)
        self._before, self._windows = None, []
        self._state_after, self._run_layer = None, None
        if slots is not self.cache:
            self.cache = slots
            if n_keep:
                mx.async_eval(slots)

    def _slots_after(self, n_rows: int, n_keep: int) -> list[Any]:
        """The slots after the first `n_keep` rows of the open block of `n_rows`."""
        if self._before is None or n_keep == n_rows:
            return self.cache
        if n_keep == 0:
            return self._before
        if self._run_layer is not None:
            whole, self.cache = self.cache, list(self._before)
            self._run_layer(n_keep)  # lazy: only what the slots need is ever computed
            slots, self.cache = self.cache, whole
            return slots
        # Copies: a view would hold the rows of the whole block.
        slots = [mx.contiguous(rows[:, n_keep : n_keep + n]) for rows, n in self._windows]
        if self._state_after is not None:
            slots.append(self._state_after(n_keep))
        assert len(slots) == len(self.cache), "a recurrent layer has a slot that is not noted"
        return slots


def watch(mixer: nn.Module, convolutions: Sequence[nn.Module], recurrence: Recurrence | None):
    """Let a recurrent layer note a block's inputs in its RecurrentCache.

    Args:
        mixer: The module that is called with the cache.
        convolutions: Its nn.Conv1d modules, in the order of their slots.
        recurrence: What follows them; None for a pure convolution.
    """
    swaps = Swaps()
    current: list[RecurrentCache] = []  # the open cache of the call in progress
    methods: dict[str, Any] = {}
    if recurrence is not None:
        noted = _noting(recurrence, current)
        methods = dict(rebind(type(mixer), recurrence.function.__name__, noted))
    original = methods.get("__call__", type(mixer).__call__)

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        caches = (c for c in (*args, *kwargs.values()) if isinstance(c, RecurrentCache))
        current.extend(cache for cache in caches if cache.is_open)
        try:
            return original(module, *args, **kwargs)
        finally:
            current.clear()

    swaps.swap(mixer, {**methods, "__call__": call})
    for convolution in convolutions:
        _watch_convolution(swaps, convolution, current)


def watch_layer(layer: nn.Module) -> None:
    """Let a layer whose recurrence is not known here note its arguments in its RecurrentCache."""
    original: Any = type(layer).__call__

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        def run(n_keep: int) -> Any:
            n_rows = args[0].shape[1]
            cut = [_first_rows(one, n_rows, n_keep) for one in args]
            named = {name: _first_rows(one, n_rows, n_keep) for name, one in kwargs.items()}
            return original(module, *cut, **named)

        for cache in (*args, *kwargs.values()):
            if isinstance(cache, RecurrentCache) and cache.is_open:
                cache.note_layer(run)
        return original(module, *args, **kwargs)

    Swaps().swap(layer, {"__call__": call})


def _first_rows(argument: Any, n_rows: int, n_keep: int) -> Any:
    """An argument of shape (B, n_rows, ..) cut to its first rows; others as they are."""
    is_rows = isinstance(argument, mx.array) and argument.ndim > 1 and argument.shape[1] == n_rows
    return argument[:, :n_keep] if is_rows else argument


def _noting(recurrence: Recurrence, current: list[RecurrentCache]) -> Callable[..., Any]:
    """The recurrence's function, noting its arguments while a block is open."""
    parameters = signature(recurrence.function)

    def run(*args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
        if not current:
            return recurrence.function(*args, **kwargs)
        arguments = dict(parameters.bind(*args, **kwargs).arguments)
        output, states = recurrence.run(arguments)
        if len(states) * states[-1].nbytes > _MOST_STATE_BYTES:
            states = states[-1:]
        held = tuple(states)

        def state_after(n_rows: int) -> mx.array:
            if len(held) > 1:
                return held[n_rows - 1]
            return recurrence.state_after(arguments, n_rows)

        current[0].note_recurrence(state_after)
        return output, held[-1]

    return run


def _watch_convolution(swaps: Swaps, convolution: Any, current: list[RecurrentCache]) -> None:
    original = type(convolution)

    def call(module: Any, rows: mx.array) -> mx.array:
        if current:
            current[0].note_window(rows, module.weight.shape[1] - 1)
        return original.__call__(module, rows)

    swaps.swap(convolution, {"__call__": call})
