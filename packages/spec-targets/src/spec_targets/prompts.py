"""Short prompts of several new sequences through one forward.

Every sequence begins at position 0, and padding stands behind its end, where nothing causal looks:
fresh caches of B sequences need no mask. A forward of few ids costs mostly what its number does not
change, such as unpacking weights. Shapes are few, as each costs a CUDA device a start of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from spec_core import TargetOutput
from spec_targets.batching import power_of_two
from spec_targets.forward import Forward

MOST = 128  # ids of a prompt: four fill a forward; of longer ones too few do to gain by it
_LEAST = 32  # ids that a shorter one is padded to: fewer shapes, at next to no cost
_MOST_PADDED = 512  # ids of a forward, padding included


def most_prompt_ids(entries: Sequence[Any]) -> int:
    """Most ids of a prompt for such cache entries: 0 but for plain keys and values.

    Windows and packed rows keep places of their own for what is padding, and recurrent state would
    take it in.
    """
    return MOST if all(type(entry) is KVCache for entry in entries) else 0


def prefill_rows(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[list[Any]],
    taps: Sequence[int],
) -> list[TargetOutput]:
    """Forward whole prompts, as many at a time as one forward may hold.

    Args:
        forward: The model.
        prompts: At most `MOST` ids each.
        caches: New entries of each sequence, all KVCaches; they are filled at the end.
        taps: Layers to record.

    Returns:
        By prompt, logits (1, V) of its last id and taps (len(prompt), H); evaluated.

    Raises:
        ValueError: a prompt is empty or longer than `MOST`.
    """
    for prompt in prompts:
        if not 0 < len(prompt) <= MOST:
            raise ValueError(f"[prefill] Prompts must have 1..{MOST} ids, got {len(prompt)}.")
    outputs: dict[int, TargetOutput] = {}
    held: dict[int, list[list[mx.array]]] = {}
    for rows in _groups([len(prompt) for prompt in prompts]):
        group = [prompts[row] for row in rows]
        entries = [KVCache() for _ in caches[rows[0]]]
        some = _forwarded(forward, group, entries, taps)
        outputs |= dict(zip(rows, some, strict=True))
        held |= dict(zip(rows, _by_row(entries), strict=False))  # padding has no row
    arrays = [array for layers in held.values() for pair in layers for array in pair]
    mx.eval(arrays, [[output.logits, *output.taps] for output in outputs.values()])
    for row, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
        for entry, (keys, values) in zip(cache, held[row], strict=True):
            entry.keys, entry.values, entry.offset = keys, values, len(prompt)
    return [outputs[row] for row in range(len(prompts))]


def _forwarded(
    forward: Forward, prompts: Sequence[Sequence[int]], entries: list[Any], taps: Sequence[int]
) -> list[TargetOutput]:
    """One forward of prompts and padding; the entries then hold all of it."""
    lengths = [len(prompt) for prompt in prompts]
    n_ids, n_rows = _shape(lengths)
    ids = [[*prompt, *[0] * (n_ids - len(prompt))] for prompt in prompts]
    ids += ids[:1] * (n_rows - len(ids))
    ends = mx.array([n - 1 for n in lengths] + [0] * (n_rows - len(lengths)), mx.int32)
    logits, tapped = forward.rows(mx.array(ids, mx.int32), entries, taps, at=ends)
    return [
        TargetOutput(logits[row], tuple(tap[row, :n] for tap in tapped))
        for row, n in enumerate(lengths)
    ]


def _by_row(entries: Sequence[Any]) -> Iterator[list[list[mx.array]]]:
    """Keys and values (1, HK, capacity, D) of all layers, row by row.

    What stands behind a row's end is never read, as after a rejected block. A row is a view until
    it is first written to, or joined to others.
    """
    layers = [[mx.split(array, array.shape[0]) for array in e.state[:2]] for e in entries]
    for row in range(entries[0].keys.shape[0]):
        yield [[parts[row] for parts in layer] for layer in layers]


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that share a forward, long ones with long ones."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        n_ids, n_rows = _shape([lengths[r] for r in [*(groups or [[]])[-1], row]])
        if not groups or n_ids * n_rows > _MOST_PADDED:
            groups.append([])
        groups[-1].append(row)
    return groups


def _shape(lengths: Sequence[int]) -> tuple[int, int]:
    """Ids of a row, and rows, of the forward that holds prompts of such lengths."""
    return max(power_of_two(max(lengths)), _LEAST), power_of_two(len(lengths))
