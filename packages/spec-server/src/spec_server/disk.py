"""Kept states on disk, so that a restarted server finds them again.

A file is written under a passing name, flushed, and renamed to a name that holds the digest of its
bytes: whatever is cut, flipped or swapped no longer matches its name and counts as a miss. Files
lie in a folder per model and settings, named by a digest of the weights themselves, so no state is
ever used with others. A folder that takes nothing more is still read. Contexts of drafters that
read taps are not written; with such a drafter the tier stays off. Used by the engine thread alone.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from spec_server.jobs import Served, common_prefix

_log = logging.getLogger("spec_server")
_FORMAT = 2
_SAMPLE = 64  # numbers of each weight that go into the fingerprint
_PASSING = ".part"
_KILLED_S = 3600  # a file in the making that is older belongs to nobody

Rebuild = Callable[[Sequence[mx.array], dict[str, Any], int], Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file and the ids it stands for."""

    path: Path
    tokens: tuple[int, ...]
    nbytes: int


class DiskTier:
    """A folder of kept states.

    Args:
        folder: Of this model and these settings; made if missing.
        budget: Most bytes of files.
        rebuild: Arrays, layout and length to a frozen cache.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, budget: int, rebuild: Rebuild) -> None:
        self._folder = folder
        self._budget = budget
        self._rebuild = rebuild
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{_PASSING}"):  # a write that was killed, or another server's
            if time.time() - _age(left) > _KILLED_S:
                _remove(left)
        self.stored: list[Stored] = []
        for path in sorted(folder.glob("*.safetensors"), key=_age):
            self._index(path)

    def save(self, tokens: tuple[int, ...], frozen: Any) -> None:
        """Write a state; a full disk or a lost folder is logged and changes nothing."""
        if any(common_prefix(s.tokens, tokens) == len(tokens) for s in self.stored):
            return
        passing = self._folder / f"{uuid.uuid4().hex}{_PASSING}"
        try:
            arrays = {str(i): array for i, array in enumerate(frozen.arrays())}
            arrays["tokens"] = mx.array(list(tokens), mx.int32)
            described = {"format": _FORMAT, "layout": frozen.layout(), "offset": frozen.offset}
            with passing.open("wb") as file:
                mx.save_safetensors(file, arrays, {"state": json.dumps(described)})
                file.flush()
                os.fsync(file.fileno())
            n_bytes = passing.stat().st_size
            path = self._folder / f"{_digest(passing)}.safetensors"
            passing.replace(path)
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning("[prefix] A state could not be written: %s", error)
            _remove(passing)
            return
        self.stored.append(Stored(path, tokens, n_bytes))
        self._shrink()

    def best(self, prompt: Sequence[int]) -> tuple[Stored | None, int]:
        """The file that shares most with a prompt, and how much that is."""
        shared = [(common_prefix(s.tokens, prompt), s) for s in self.stored]
        n, stored = max(shared, key=lambda pair: pair[0], default=(0, None))
        return stored, n

    def load(self, stored: Stored) -> Any:
        """The frozen cache of a file; None, and the file goes, when it is not what was written."""
        try:
            if _digest(stored.path) != stored.path.stem:
                raise ValueError("its bytes are not those that were written")
            arrays, described = _read(stored.path)
            own = [arrays[str(i)] for i in range(len(arrays) - 1)]
            mx.eval(own)
            with contextlib.suppress(OSError):  # a folder for reading alone
                os.utime(stored.path)
            return self._rebuild(own, described["layout"], described["offset"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, StopIteration) as error:
            _log.warning('[prefix] "%s" is dropped: %s', stored.path.name, error)
            self._drop(stored)
            return None

    def _index(self, path: Path) -> None:
        try:
            arrays, described = _read(path)
            ids: Any = arrays["tokens"].tolist()  # sync: once per file, at the start
            if described["format"] != _FORMAT:
                raise ValueError(f"its format is {described['format']}, not {_FORMAT}")
            self.stored.append(Stored(path, tuple(ids), path.stat().st_size))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            _log.warning('[prefix] "%s" is dropped: %s', path.name, error)
            _remove(path)

    def _shrink(self) -> None:
        """Drop the files that were not used for longest until the budget holds."""
        for stored in sorted(self.stored, key=lambda s: _age(s.path)):
            if sum(s.nbytes for s in self.stored) <= self._budget:
                return
            self._drop(stored)

    def _drop(self, stored: Stored) -> None:
        self.stored.remove(stored)
        _remove(stored.path)


def open_disk_tier(folder: Path, budget: int, served: Served, rebuild: Rebuild) -> DiskTier | None:
    """The tier of what is served; None, with the reason in the log, where it cannot be used."""
    drafter = served.pair.drafter
    if drafter is not None and drafter.taps:
        _log.warning(
            '[prefix] States are not kept on disk with drafter "%s", whose context is not written.',
            drafter.name,
        )
        return None
    try:
        return DiskTier(folder / fingerprint(served), budget, rebuild)
    except OSError as error:
        _log.warning('[prefix] States are not kept on disk: "%s": %s', folder, error)
        return None


def fingerprint(served: Served) -> str:
    """A digest of weights, tokenizer and settings: a sample of every weight, not its name alone."""
    digest = hashlib.sha256()

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    target = served.pair.target
    add(_FORMAT, mx.__version__, served.model, served.mode, served.fingerprint)
    add(target.vocab_size, getattr(target, "kv_bits", None), getattr(target, "model_type", None))
    model: Any = getattr(target, "model", None)
    weights = tree_flatten(model.parameters()) if model is not None else []
    for name, array in weights:
        flat = array.reshape(-1)
        sample = flat[:: max(flat.size // _SAMPLE, 1)].astype(mx.float32)
        add(name, array.shape, str(array.dtype), sample.tolist())  # sync: once, at the start
    return digest.hexdigest()[:32]


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    return arrays, json.loads(metadata["state"])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Delete a file where that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
