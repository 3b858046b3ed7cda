"""The base of compressors with which every rank sends its own largest elements, with their places."""

from __future__ import annotations

import itertools
from abc import abstractmethod

import torch
from torch import Tensor

from commhooks.compressors.sparse.gathering import Sent, SparsePiece, SparsePlan, gather, scatter
from commhooks.compressors.sparse.indices import Indices
from commhooks.language import BucketView, Compressor, Context, Exchange, Sends
from commhooks.tensors import computing_dtype


class OwnPlaces(Compressor):
    """A compressor that adds up elements that each rank has chosen on its own: one collective per bucket."""

    sends = Sends.ANYTHING  # what is sent cannot be summed

    @property
    @abstractmethod
    def most(self) -> tuple[Indices, float]:
        """The coding of indices, and the largest fraction of a parameter's elements in a message."""

    @abstractmethod
    def sent_of(self, piece: SparsePiece, context: Context) -> Sent:
        """Choose the elements to send of a piece."""

    @abstractmethod
    def left_of(self, own: Sent) -> Tensor:
        """Return the unsent part of a piece's memory, which it overwrites."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's elements and their places; the mean is their sum, in rank order."""
        if not bucket.filled:
            return
        plan = bucket.plan(self, lambda: SparsePlan.of(bucket, *self.most))
        sent = [self.sent_of(piece, context) for piece in plan.pieces]
        finite, received = yield from gather(plan, sent, context)
        for own, of_all in zip(sent, received, strict=True):
            tile = own.piece.tile
            tile.keep(self.left_of(own), finite)
            tile.write(of_all.overwrite(tile.room))

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the elements of each rank's shards and their places; each rank adds up its own, in rank order.

        They are chosen from each shard separately, as from a parameter of its size.
        """
        plans = bucket.plan((self, "shards"), lambda: SparsePlan.of_shards(bucket, *self.most))
        sent = [[self.sent_of(piece, context) for piece in plan.pieces] for plan in plans]
        finite, received = yield from scatter(bucket, plans, sent, context)
        if finite is not None:
            for own in itertools.chain.from_iterable(sent):
                own.piece.tile.keep(self.left_of(own), finite)
        for piece, of_all in zip(plans[context.rank].pieces, received, strict=True):
            mean = piece.slot.mean
            wide = computing_dtype(mean.dtype)
            room = mean if mean.dtype == wide else torch.empty_like(mean, dtype=wide)
            of_all.overwrite(room)
            if room is not mean:
                mean.copy_(room)
