"""Calibrations on disk: one JSON file per key, replaced whole.

A file that is damaged, from another version or for another key is a miss with a reason, never an
error; so is a folder that cannot be read. Each key has its own file and a file is only ever
replaced by a complete one, so processes that write at once lose nothing but the slower one's copy
of the same measurement. Knows nothing about how curves are measured.
"""

import contextlib
import json
import math
import os
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import platformdirs

from spec_calibrate.curves import Curves
from spec_calibrate.keys import Key

SCHEMA = 1
"""Version of the files' layout; a file of another version is a miss."""

_LARGEST = 1 << 20  # bytes; no calibration comes near
_NAMES = "[0-9a-f]" * 20 + ".json"  # a folder may hold other files, which are not ours to delete


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store has for a key.

    Attributes:
        curves: None for a miss.
        created: When they were measured, ISO 8601; empty for a miss.
        reason: Why a file that is there cannot be used; empty for a hit or a plain miss.
        tries: How often they have been measured, the best kept.
    """

    curves: Curves | None = None
    created: str = ""
    reason: str = ""
    tries: int = 0

    @property
    def age_s(self) -> float:
        """Seconds since they were measured; infinite where no clock tells, as after a jump back."""
        try:
            age_s = (datetime.now(UTC) - datetime.fromisoformat(self.created)).total_seconds()
        except (ValueError, TypeError):
            return math.inf
        return age_s if age_s >= 0 else math.inf


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the store, for listings.

    Attributes:
        path: The file.
        key: The key inside it; empty when it cannot be read.
        created: When it was measured; empty when it cannot be read.
        reason: Why it cannot be used; empty when it can.
    """

    path: Path
    key: dict[str, Any]
    created: str
    reason: str


def default_folder() -> Path:
    """The user's cache folder for calibrations; not created here."""
    return Path(platformdirs.user_cache_dir("spec")) / "calibration"


class Store:
    """Calibrations in a folder.

    Args:
        folder: Where they lie; the user's cache folder without. Created by the first `put`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else default_folder()

    def path(self, key: Key) -> Path:
        """Where a key's calibration lies, or would lie."""
        return self.folder / f"{key.digest}.json"

    def get(self, key: Key) -> Stored:
        """The calibration of a key, if there is one that can be used."""
        path = self.path(key)
        try:
            value = _read(path)
            if value["key"] != key.to_dict():
                raise ValueError("it is for another set-up")
            tries = value.get("tries")
            return Stored(
                Curves.from_dict(value["curves"]),
                value["created"],
                tries=tries if type(tries) is int else 1,
            )
        except FileNotFoundError:
            return Stored()
        except (OSError, ValueError) as error:
            return Stored(reason=f'[store] "{path}" is not used: {error}.')

    def put(self, key: Key, curves: Curves, *, tries: int = 1) -> str:
        """Keep a calibration, replacing an older one.

        Args:
            key: What it is valid for.
            curves: What was measured.
            tries: How often, the best being kept.

        Returns:
            Empty, or why it could not be kept: a full disk or a read-only folder is no reason to
            stop.
        """
        value = {
            "schema": SCHEMA,
            "key": key.to_dict(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "curves": curves.to_dict(),
            "tries": tries,
        }
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            return f'[store] The calibration is not kept, "{path}" cannot be written: {error}.'
        return ""

    def entries(self) -> list[Entry]:
        """All files of the store, usable or not, by name."""
        found: list[Entry] = []
        for path in sorted(self.folder.glob(_NAMES)) if self.folder.is_dir() else []:
            try:
                value = _read(path)
                Curves.from_dict(value["curves"])
                found.append(Entry(path, value["key"], value["created"], ""))
            except (OSError, ValueError) as error:
                found.append(Entry(path, {}, "", str(error)))
        return found

    def clear(self, key: Key | None = None) -> int:
        """Delete a key's calibration, or all of them; returns how many files are gone."""
        paths = [self.path(key)] if key is not None else [e.path for e in self.entries()]
        n_gone = 0
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
                n_gone += 1
        return n_gone


def _read(path: Path) -> dict[str, Any]:
    """A file's content, its outer form checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a calibration of this version; the message says why.
    """
    with path.open("rb") as stream:
        data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST} bytes")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        got = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"its layout must be version {SCHEMA}, got {got}")
    if not isinstance(value.get("key"), dict) or not isinstance(value.get("curves"), dict):
        raise ValueError('it must hold "key" and "curves"')
    if not isinstance(value.get("created"), str):
        raise ValueError('it must say when it was "created"')
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _replace(path: Path, text: str) -> None:
    """Write a file beside its place, then move it there in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
