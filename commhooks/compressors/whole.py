"""Uncompressed averaging of parameters whose codes would take more bytes."""

from __future__ import annotations

from collections.abc import Sequence

from commhooks.language import AllReduce, Exchange, Judge, Slot, Tile


def average_whole(tiles: Sequence[tuple[Slot, Tile]]) -> Exchange:
    """Average tiles, each of a slot, in fp32 at least; their residuals are then zero.

    They may still have a residual, from a run with another number of ranks.
    """
    parts = [slot.part(tile.form().clone()) for slot, tile in tiles]
    means = yield AllReduce(*parts, average=True, last=True)
    finite = yield Judge(*(mean.to(slot.gradient.dtype) for (slot, _), mean in zip(tiles, means, strict=True)))
    for (_, tile), mean in zip(tiles, means, strict=True):
        if tile.keeps:
            tile.keep(tile.room.zero_(), finite)
        tile.write(mean)
