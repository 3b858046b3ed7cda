"""What a compressor averages uncompressed, beside its codes: those would take more bytes."""

from __future__ import annotations

from collections.abc import Sequence

from commhooks.language.bucket import Slot
from commhooks.language.compressor import Exchange
from commhooks.language.requests import AllReduce, Judge


def average_from(starts: Sequence[tuple[Slot, int]]) -> Exchange:
    """Average each slot from an element on, in fp32 at least; one that is averaged from its first on owes nothing then.

    Such a slot may still have a residual from a run with another number of ranks.
    """
    parts = [slot.part(slot.form()[start:].clone()) for slot, start in starts]
    means = yield AllReduce(*parts, average=True, last=True)
    finite = yield Judge(*(mean.to(slot.gradient.dtype) for (slot, _), mean in zip(starts, means, strict=True)))
    for (slot, start), mean in zip(starts, means, strict=True):
        if start == 0 and slot.tile.keeps:
            slot.keep(slot.room.zero_(), finite)
        slot.mean[start:] = mean
