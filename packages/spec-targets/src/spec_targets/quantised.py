"""Keys and values held in 8 or 4 bits, from the first token on.

Rows are packed one by one, so a packed row does not depend on its neighbours, and trimming rows is
exact. Converting later, after some round, would not be: speculation and plain decoding would
convert at different tokens. Windows stay as they are, since they do not grow; so does recurrent
state.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from spec_core import LoadError

_BITS = (4, 8)
_GROUPS = (64, 32)


def check_kv_bits(bits: int) -> None:
    """Refuse widths other than 4 and 8.

    Raises:
        ValueError: another width.
    """
    if bits not in _BITS:
        raise ValueError(f"[kv-bits] kv_bits must be one of {_BITS}, got {bits}.")


def group_size_for(entries: list[Any], model_type: str) -> int:
    """Channels that share a scale: the largest supported number that divides every head.

    Args:
        entries: Cache entries after a forward, still unpacked.
        model_type: For messages.

    Raises:
        LoadError: the model keeps no growing keys, or their heads have an odd size.
    """
    heads = {
        rows.shape[-1]
        for entry in _leaves(entries)
        if type(entry) is KVCache and entry.keys is not None
        for rows in (entry.keys, entry.values)
        if rows is not None
    }
    if not heads:
        raise LoadError(
            f'[kv-bits] Family "{model_type}" keeps no keys that grow with the text, so there is '
            "nothing to pack. Leave --kv-bits out."
        )
    for group_size in _GROUPS:
        if all(head % group_size == 0 for head in heads):
            return group_size
    raise LoadError(
        f"[kv-bits] Attention heads must be a multiple of {_GROUPS[-1]} channels wide, got "
        f"{sorted(heads)}. Leave --kv-bits out."
    )


def pack_entry(entry: Any, bits: int, group_size: int) -> Any:
    """The entry that holds packed keys and values; kinds that do not grow stay as they are."""
    if type(entry) is KVCache:
        return QuantizedKVCache(group_size=group_size, bits=bits)
    if type(entry) is CacheList:
        return CacheList(*(pack_entry(one, bits, group_size) for one in entry.caches))
    return entry


def refuse_unreadable(model: Any, entries: list[Any], ids: mx.array, model_type: str) -> None:
    """Run a few ids over packed entries; attention that cannot read them says so here.

    Raises:
        LoadError: attention sinks, latent attention, or keys shared between layers in a way that
            packed rows do not support.
    """
    try:
        mx.eval(model(ids[None], cache=entries))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise LoadError(
            f'[kv-bits] The attention of family "{model_type}" cannot read packed keys: {error} '
            "Leave --kv-bits out."
        ) from error


def _leaves(entries: list[Any]) -> list[Any]:
    leaves: list[Any] = []
    for entry in entries:
        leaves += _leaves(list(entry.caches)) if type(entry) is CacheList else [entry]
    return leaves
