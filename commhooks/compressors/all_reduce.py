"""All-reduce: the plain mean, without compression.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
Idea: every rank divides its gradient by the number of ranks, and the sum over ranks is the mean.
Bytes on the wire: the whole gradient. Weakness: that is a lot.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commhooks.language import AllReduce, BucketView, Compressor, Context, Exchange, Part, ReduceScatter


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceMean(Compressor):
    """A compressor that averages the gradient uncompressed: one collective per bucket.

    Takes sparse and complex gradients too.
    """

    def takes(self, gradient: Tensor) -> bool:
        """Return True: sparse and complex gradients are supported too."""
        return True

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Request the mean of the bucket's memory."""
        means = yield AllReduce(*(tile.part() for tile in bucket.tiles), average=True, last=True)
        for tile, mean in zip(bucket.tiles, means, strict=True):
            tile.write(mean)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Request the mean of this rank's row."""
        rows = [Part(memory, in_place=True) for memory, _ in bucket.rows]
        means = yield ReduceScatter(*rows, average=True, last=True)
        for (_, place), mean in zip(bucket.rows, means, strict=True):
            place.copy_(mean[: len(place)])
