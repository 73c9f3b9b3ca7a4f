"""The attention kernel in the layers of one model instance.

An attention layer calls a module-level function by name; a wrapped one finds the kernel under that
name, and keeps its parameters, paths and `isinstance`. What the kernel does not serve goes to the
model's own function, or to plain operations where that one plans anew for every length (cuDNN).
Knows no model family.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from spec_kernels._build import ExactError, KernelError
from spec_kernels.attention import Attend, RowAttention, few_query_attention
from spec_kernels.attention import unsupported as attention_unsupported
from spec_kernels.layers import BASE, Switch

_LOST = "stock was faster here"
_FEW = 32  # queries from which cuDNN may be worth a plan for every length
_FEW_SCORES = 2**18  # the same for queries times keys: a short prompt costs less than its plan


@dataclass(frozen=True, slots=True)
class _Served:
    """The kernel for one shape of queries, and what it asks of the rest."""

    attend: Attend
    least: int  # keys
    dtype: mx.Dtype

    def fits(self, q: mx.array, k: mx.array) -> bool:
        return k.shape[2] >= self.least and q.dtype == self.dtype == k.dtype


class AttentionKernel:
    """Stands in for the attention function of a model's module, for one model instance.

    Args:
        original: the function it stands in for, called with the same arguments for all else.
        min_keys: for each number of query positions, the cache length from which the kernel serves;
            a number that is missing stays stock outside exact mode.
        switch: shared by all layers of the model.
        where: name of the kernel's backend.
        raced: whether `min_keys` tells who was faster; False where the kernel cannot serve at all.
    """

    def __init__(
        self,
        original: Callable[..., mx.array],
        min_keys: dict[int, int],
        switch: Switch,
        where: str,
        *,
        raced: bool = True,
    ) -> None:
        self._lost = _LOST if raced else "no kernel for these heads"
        self._raced = raced
        self._original, self._min_keys, self._found = original, min_keys, min_keys
        self._switch, self._where = switch, where
        self._counted = f"attention {where}"
        self._kernels: dict[float, RowAttention] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._served: dict[tuple, _Served] = {}
        self._own: set[tuple[int, ...]] = set()  # single queries that no length brings the kernel
        self._whole: dict[tuple, Attend] = {}
        self.classes: dict[type, type] = {}  # one for all layers: Python's caches are by class
        switch.served += [self._served, self._own]

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """Attend with the kernel where it serves, else with the model's own function.

        A cache with an attribute `n_keys`, int32, one for each sequence, says that `keys` and
        `values` are whole buffers which hold so many: see `Installed.least_keys` and
        `Installed.reads_ragged`. Its attribute `fresh`, if it has one, are the newest keys and
        values, which the buffers do not have yet.
        """
        n_keys = getattr(cache, "n_keys", None)
        if n_keys is not None:
            attend = self._within(queries, keys, scale, mask, sinks)
            self._switch.calls[self._counted] += 1
            return attend(queries, keys, values, n_keys, getattr(cache, "fresh", ()))
        shape = queries.shape
        if shape not in self._own or (mask is not None and isinstance(mask, mx.array)):
            plain = sinks is None and (mask is None or isinstance(mask, str))
            if plain and isinstance(keys, mx.array):
                served = self._served.get((shape, keys.shape[1], scale, mask))
                if served is not None and served.fits(queries, keys):
                    self._switch.calls[self._counted] += 1
                    return served.attend(queries, keys, values)
            out = self._decide(queries, keys, values, scale, mask, sinks)
            if out is not None:
                return out
        own = self._original
        if sinks is None and not others:  # by far the cheapest way to call it
            return own(queries, keys, values, cache=cache, scale=scale, mask=mask)
        if sinks is not None:
            others["sinks"] = sinks
        return own(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)

    def _decide(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array | None:
        """Attend with the kernel or plain operations; None where the model's own function must."""
        reason = self._why_not(queries, keys, mask, sinks)
        if queries.shape not in self._seen:
            self._seen.add(queries.shape)
            self._switch.fresh = True
        if reason is None:
            self._switch.calls[self._counted] += 1
            attend = self._kernel(scale).bound(queries, keys, mask is not None)
            key = (queries.shape, keys.shape[1], scale, mask)
            least = max(self.least_keys(queries.shape[2]) or 1, queries.shape[2])
            self._served[key] = _Served(attend, least, queries.dtype)
            return attend(queries, keys, values)
        if self._takes_plain(queries, keys, mask, sinks, reason):
            self._switch.calls["attention plain"] += 1
            return few_query_attention(queries, keys, values, scale=scale, mask=mask)
        if self._switch.exact and queries.shape[2] <= self._switch.most:
            raise ExactError(f"[exact] attention must use the kernel, got: {reason}.")
        if queries.shape[2] == 1 and self.least_keys(1) is None:
            self._own.add(queries.shape)
        return None

    def serve_single(self, always: bool) -> None:
        """Let the kernel attend for one query whatever the length, or only where its race says.

        The switch must forget what served before.
        """
        self._min_keys = {**self._found, 1: 1} if always else self._found

    def least_keys(self, n_queries: int) -> int | None:
        """From how many keys the kernel serves so many positions, or None where it never does."""
        if not self._switch.on or n_queries > self._switch.most:
            return None
        return 1 if self._switch.exact else self._min_keys.get(n_queries)

    def reads_ragged(self, n_queries: int) -> bool:
        """Whether the kernel serves several sequences of different lengths.

        No race is asked: MLX would need a mask array, with which it plans anew for every length.
        """
        can = self._raced and self._where == "cuda" and n_queries <= self._switch.most
        return can and self._switch.on and not self._switch.exact

    def _within(
        self, q: mx.array, k: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> Attend:
        """What attends to the keys at the start of buffers; no other code here could."""
        key = (q.shape, q.dtype, k.shape[1], k.dtype, scale, mask is not None)
        attend = self._whole.get(key)
        plain = sinks is None and (mask is None or isinstance(mask, str))
        if attend is not None and plain:
            return attend
        reason = "attention sinks" if sinks is not None else None
        reason = reason or (f"the {self._where} kernel" if self._where != "cuda" else None)
        reason = reason or attention_unsupported(q, k, mask, self._where)
        if reason:
            raise KernelError(f"[attention] Whole buffers must go to the kernel, got: {reason}.")
        attend = self._whole[key] = self._kernel(scale).bound(q, k, mask is not None)
        return attend

    def _kernel(self, scale: float) -> RowAttention:
        kernel = self._kernels.get(scale)
        if kernel is None:
            kernel = self._kernels[scale] = RowAttention(scale, self._where)
        return kernel

    def _takes_plain(self, q: mx.array, k: Any, mask: Any, sinks: Any, reason: str) -> bool:
        """Whether plain operations serve: few queries on CUDA that no kernel and no race covers."""
        if self._where != "cuda" or self._switch.exact or reason == _LOST or sinks is not None:
            return False
        least, n = (1 if isinstance(mask, mx.array) else 2), q.shape[2]
        if n < least or not isinstance(k, mx.array):
            return False
        return n <= _FEW or n * k.shape[2] <= _FEW_SCORES

    def _why_not(self, q: mx.array, k: Any, mask: Any, sinks: Any) -> str | None:
        if not self._switch.on:
            return self._switch.reason
        n_queries = q.shape[2]
        if n_queries > self._switch.most:
            return "a prompt"
        if sinks is not None:
            return "attention sinks"
        if not isinstance(k, mx.array):
            return "a quantised cache"
        least = self.least_keys(n_queries)
        if least is None or k.shape[2] < least:
            return self._lost
        return attention_unsupported(q, k, mask, self._where)


def attention_function(layer: nn.Module, name: str) -> Callable[..., mx.array] | None:
    """The module-level function `name` that the layer's own code calls, or None."""
    call = type(layer).__call__
    code = getattr(call, "__code__", None)
    if code is None or name not in code.co_names:
        return None
    return call.__globals__.get(name)


def wrap_attention(layer: nn.Module, name: str, kernel: AttentionKernel) -> None:
    """Make this layer's code find `kernel` under the global name `name`."""
    base = type(layer)
    if base not in kernel.classes:
        kernel.classes[base] = _attention_class(base, name, kernel)
    object.__setattr__(layer, "__class__", kernel.classes[base])


def _attention_class(base: type, name: str, kernel: AttentionKernel) -> type:
    call = base.__call__
    copy = types.FunctionType(
        call.__code__,
        {**call.__globals__, name: kernel.__call__},  # called sooner than through its class
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
    copy.__kwdefaults__ = call.__kwdefaults__
    return type(base.__name__, (base,), {"__call__": copy, BASE: base})
