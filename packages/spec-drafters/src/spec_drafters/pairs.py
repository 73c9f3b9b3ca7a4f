"""Known target -> drafter pairs: reads `pairs.toml` and matches a model's name, data only."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target and the heads that were trained for it.

    Attributes:
        id: What a target's name must contain, lower case.
        target: The checkpoint that the numbers belong to.
        mode: What mode "auto" picks.
        lookup: Copied drafts pay on top of this head.
        block: Rows of a block.
        drafts: Drafts of a whole block.
        cap: Drafts to verify that were best where it was measured.
        dspark: Hub id of the DSpark head, or None.
        dflash: Hub id of the DFlash or DFlash 2 head, or None.
        confidence_threshold: Where drafts are cut, 0 for nowhere.
        accept: Reported tokens per target forward, or None.
        speedup: Reported gain over plain decoding, or None.
        memory_gb: Reported memory of both models, or None.
    """

    id: str
    target: str
    mode: str
    lookup: bool
    block: int
    drafts: int
    cap: int
    dspark: str | None = None
    dflash: str | None = None
    confidence_threshold: float = 0.0
    accept: float | None = None
    speedup: float | None = None
    memory_gb: float | None = None

    def drafter_for(self, mode: str) -> str | None:
        """Hub id of the head of a mode; "auto" gives the pair's best, else DFlash, else None."""
        heads = {"dspark": self.dspark, "dflash": self.dflash}
        if mode == "auto":
            return heads.get(self.mode) or self.dflash or self.dspark
        return heads.get(mode)


@dataclass(frozen=True, slots=True)
class OtherHead:
    """A head that loads and that no known pair picks: for a user to name.

    Attributes:
        head: Hub id.
        target: Name of its target.
        mode: What it is.
    """

    head: str
    target: str
    mode: str


def known_pairs() -> tuple[KnownPair, ...]:
    """All pairs, in the table's order."""
    return tuple(KnownPair(**entry) for entry in _table()["pair"])


def other_heads() -> tuple[OtherHead, ...]:
    """Heads that load but are picked by no pair, in the table's order."""
    return tuple(OtherHead(**entry) for entry in _table()["other"])


def find_other(model: str, mode: str) -> str | None:
    """Hub id of the first other head of a mode for a target; None where there is none.

    Args:
        model: A hub id or a path; its last part counts.
        mode: "dspark", "dflash" or "eagle3".
    """
    name = _last_part(model)
    fits = (head for head in other_heads() if head.mode == mode and _occurs(head.target, name))
    return next((head.head for head in fits), None)


def find_pair(model: str) -> KnownPair | None:
    """The pair of a target, whatever its quantisation; None for an unknown one.

    Args:
        model: A hub id or a path; its last part counts.
    """
    name = _last_part(model)
    by_length = sorted(known_pairs(), key=lambda pair: -len(pair.id))
    return next((pair for pair in by_length if _occurs(pair.id, name)), None)


def _last_part(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def _occurs(target: str, name: str) -> bool:
    """Whether a target's name is part of a lower-case one, with or without its dashes."""
    target = target.lower()
    return target in name or target.replace("-", "") in name.replace("-", "")


@cache
def _table() -> dict[str, Any]:
    text = files("spec_drafters").joinpath("pairs.toml").read_text("utf-8")
    return tomllib.loads(text)
