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
    def least(self, context: Context) -> float | Tensor:
        """Return the magnitude below which an element is not sent, although there is room for it; 0: there is none."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's elements and their places; the mean is their sum, in rank order."""
        if not bucket.filled:
            return
        plan = bucket.plan(self, lambda: SparsePlan.of(bucket, *self.most))
        least = self.least(context)
        sent = [Sent.taken_of(piece, least) or _sent_of(piece, least) for piece in plan.pieces]
        finite, received = yield from gather(plan, sent, context)
        bucket.settle(finite)
        for own, of_all in zip(sent, received, strict=True):
            tile = own.piece.tile
            if not own.is_taken:
                tile.keep(_left_of(own, least), finite)
            tile.write(of_all.overwrite(tile.room))

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the elements of each rank's shards and their places; each rank adds up its own, in rank order.

        They are chosen from each shard separately, as from a parameter of its size.
        """
        plans = bucket.plan((self, "shards"), lambda: SparsePlan.of_shards(bucket, *self.most))
        least = self.least(context)
        sent = [[_sent_of(piece, least) for piece in plan.pieces] for plan in plans]
        finite, received = yield from scatter(bucket, plans, sent, context)
        if finite is not None:
            for own in itertools.chain.from_iterable(sent):
                own.piece.tile.keep(_left_of(own, least), finite)
        for piece, of_all in zip(plans[context.rank].pieces, received, strict=True):
            mean = piece.slot.mean
            wide = computing_dtype(mean.dtype)
            room = mean if mean.dtype == wide else torch.empty_like(mean, dtype=wide)
            of_all.overwrite(room)
            if room is not mean:
                mean.copy_(room)


def _sent_of(piece: SparsePiece, least: float | Tensor) -> Sent:
    """Return the largest elements of a piece, with zeros in place of those below `least`."""
    own = Sent.largest_of(piece, piece.tile.form())
    if not isinstance(least, Tensor) and least == 0:
        return own
    is_small = own.values.abs() < least  # false for NaN, which has to be sent
    return own._replace(values=own.values.masked_fill_(is_small, 0.0))


def _left_of(own: Sent, least: float | Tensor) -> Tensor:
    """Return the elements that were not sent, or were zeros in the message; they overwrite the piece's memory."""
    M = own.piece.tile.form()
    if not isinstance(least, Tensor) and least == 0:
        return M.index_fill_(0, own.places, 0.0)
    left = torch.where(own.values == 0, M.index_select(0, own.places), 0.0)
    return M.index_copy_(0, own.places, left)
