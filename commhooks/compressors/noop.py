"""No-op: nothing is exchanged, and every rank keeps its own gradient.

Idea: measures the rest of a step, as if communication cost nothing; never train with it.
Bytes on the wire: none. Weakness: replicas drift apart.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commhooks.language import BucketView, Compressor, Context, Exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOp(Compressor):
    """A compressor that leaves every rank's gradient unchanged, without a collective."""

    def takes(self, gradient: Tensor) -> bool:
        """Return True: sparse and complex gradients are supported too."""
        return True

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Request nothing."""
        yield from ()
        for tile in bucket.tiles:
            tile.write(tile.gradient)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Keep this rank's row."""
        yield from ()
        for memory, place in bucket.rows:
            place.copy_(memory[context.rank, : len(place)])
