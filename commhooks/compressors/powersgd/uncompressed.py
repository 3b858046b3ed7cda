"""What a low-rank compressor averages as it is, beside the factors of its matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.language.requests import Layout, Part
from commhooks.language.tile import Tile

SMALL_ELEMENTS = 1 << 12
"""Vectors of at most this many elements become one part: copying them takes less time than sending each by itself."""


class Uncompressed:
    """Tiles to be averaged: those that are small side by side, as one part, and a part for each of the others."""

    def __init__(self, tiles: Sequence[Tile], wire: torch.dtype | None) -> None:
        small = [tile for tile in tiles if _is_small(tile)]
        is_worth_it = len(small) > 1
        self._others = [tile for tile in tiles if not (is_worth_it and _is_small(tile))]
        self._small = [tile.gradient.view(-1) for tile in small] if is_worth_it else []
        self._means = [tile.mean.view(-1) for tile in small]
        self._sizes = [gradient.numel() for gradient in self._small]
        self._parts = [Part(tile.gradient, tile.layout, wire) for tile in self._others]
        if self._small:
            keys = tuple(key for tile in small for key in tile.layout.keys)
            sizes = tuple(size for tile in small for size in tile.layout.sizes)
            together = self._small[0].new_empty(sum(self._sizes))
            self._parts.append(Part(together, Layout(keys, sizes), wire))

    def parts(self) -> Sequence[Part]:
        """Return this step's parts."""
        if self._small:
            torch.cat(self._small, out=self._parts[-1].tensor)
        return self._parts

    def write(self, means: Sequence[Tensor]) -> None:
        """Write the mean of each part."""
        for tile, mean in zip(self._others, means[: len(self._others)], strict=True):
            tile.write(mean)
        if self._small:
            torch._foreach_copy_(self._means, list(means[-1].split(self._sizes)))


def _is_small(tile: Tile) -> bool:
    return tile.layout.elements == tile.gradient.numel() <= SMALL_ELEMENTS
