"""Row and column orders that GGUF converters change, and how to change them back.

An order is stated as what the source did; `indices` says which source row each output row comes
from. Knows nothing about names or storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_convert.errors import ConvertError

Indices = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class Interleaved:
    """Rotary pairs side by side within each head, to be returned to half-split order.

    Attributes:
        heads: number of heads the rows are divided into.
    """

    heads: int

    def indices(self, n_rows: int) -> Indices:
        """Source row of every output row.

        Raises:
            ConvertError: the rows do not divide into heads of even width.
        """
        if self.heads < 1 or n_rows % (2 * self.heads):
            raise ConvertError(
                f"[names] Rows must be a multiple of twice the {self.heads} heads, got {n_rows}. "
                "The file is damaged."
            )
        pairs = np.arange(n_rows).reshape(self.heads, n_rows // self.heads // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class Tiled:
    """Value heads tiled over key heads, to be grouped by key head again.

    Attributes:
        skipped: leading rows that keep their place.
        key_heads: number of key heads.
        per_key: value heads for each key head.
        width: rows of one value head.
    """

    skipped: int
    key_heads: int
    per_key: int
    width: int

    def indices(self, n_rows: int) -> Indices:
        """Source row of every output row.

        Raises:
            ConvertError: the rows are not the skipped ones and all value heads.
        """
        if n_rows != self.skipped + self.key_heads * self.per_key * self.width:
            raise ConvertError(
                f"[names] Rows must be {self.skipped} and {self.key_heads} x {self.per_key} value "
                f"heads of {self.width}, got {n_rows}. The file is damaged."
            )
        tiles = np.arange(self.skipped, n_rows).reshape(self.per_key, self.key_heads, self.width)
        return np.concatenate([np.arange(self.skipped), tiles.swapaxes(0, 1).reshape(-1)])


@dataclass(frozen=True)
class Half:
    """One of two matrices that each block of rows holds one after the other.

    Attributes:
        which: 0 for the first, 1 for the second.
        blocks: number of blocks, such as experts.
    """

    which: int
    blocks: int

    def indices(self, n_rows: int) -> Indices:
        """Source rows of the wanted half.

        Raises:
            ConvertError: the rows do not divide into blocks of two halves.
        """
        if self.blocks < 1 or n_rows % (2 * self.blocks):
            raise ConvertError(
                f"[names] Rows must be a multiple of twice the {self.blocks} blocks, "
                f"got {n_rows}. The file is damaged."
            )
        rows = np.arange(n_rows).reshape(self.blocks, 2, -1)
        return rows[:, self.which].reshape(-1)


Order = Interleaved | Tiled | Half
