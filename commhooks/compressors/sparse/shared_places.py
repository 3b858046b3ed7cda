"""The base of compressors that send elements at indices drawn identically on all ranks."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod

import torch
from torch import Tensor

from commhooks.language import BucketView, Compressor, Context, Exchange, Loss, setting
from commhooks.language.requests import AllReduce, AllToAll, Flags, Judge, Part, ReduceScatter
from commhooks.tensors import computing_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPlaces(Compressor):
    """A compressor that averages `ratio` of each parameter's elements, at indices that every rank knows.

    It takes one sum per bucket.
    """

    ratio: float = setting(0.01, above=0, most=1)
    """Lower: smaller messages, but more left unsent. At least one element of each parameter is sent."""
    unbiased: bool = False
    """True: elements are sent times n/k, so that the mean is right on average, and nothing is kept for later steps."""
    seed: int = 0
    """Seeds the indices, together with the parameter's name and the step."""

    @abstractmethod
    def places(self, name: str, gradient: Tensor, step: int) -> Tensor:
        """Return the k indices of a step into a gradient [n], each equally likely, given its parameter's name."""

    def k(self, elements: int) -> int:
        """Return the number of elements sent, of `elements`."""
        return math.ceil(self.ratio * elements)

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return 1 - k/n unless everything is sent, or n/k - 1 if unbiased: the expectation over the indices."""
        n = parameter.numel()
        if self.unbiased:
            return Loss(n / self.k(n) - 1 if n else 0.0, unbiased=True, is_kept=False)
        return Loss(1 - self.k(n) / n) if self.k(n) < n else None

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Average the elements at the step's indices; the other means are zero."""
        slots = bucket.filled
        if not slots:
            return
        places, parts = [], []
        for slot in slots:
            M = slot.form()
            places.append(self.places(slot.name, slot.gradient, context.step))
            values = M[places[-1]]
            if self.unbiased:
                values *= len(M) / len(values)
            # Zero, or NaN if any element is not finite, even one that is not sent.
            parts += [slot.part(values), slot.part(M.norm(math.inf).reshape(1) * 0)]
        answers = yield AllReduce(*parts, average=True, last=True)

        means = [mean.to(slot.gradient.dtype) for slot, mean in zip(slots, answers[::2], strict=True)]
        finite = yield Judge(*means, *answers[1::2])
        for slot, at, mean in zip(slots, places, means, strict=True):
            if slot.tile.keeps:
                M = slot.form()
                M[at] -= context.as_sent(M[at])  # zero, except for what a narrow wire dtype rounds away
                slot.keep(M, finite)
            room = slot.room.zero_().index_copy_(0, at, mean.to(slot.room.dtype))
            slot.write(room.add_(torch.where(finite, 0.0, torch.nan)))  # one bad element shows on every rank

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Average elements of each rank's shards, chosen from each shard separately; the other means are zero."""
        ranks, rank = context.world_size, context.rank
        sent, parts, seen = [], list[Part](), list[Tensor]()
        for slot in bucket.slots:
            most = max(self.k(tile.gradient.numel()) for tile in slot.shards)
            values = bucket.memory.new_zeros(ranks, most, dtype=computing_dtype(bucket.memory.dtype))
            of_ranks = list[Tensor | None]()
            for to, tile in enumerate(slot.shards):
                if not tile.gradient.numel():
                    of_ranks.append(None)
                    continue
                M = tile.form()
                at = self.places(f"{slot.name}/{to}", tile.gradient, context.step)
                torch.mul(M[at], len(M) / len(at) if self.unbiased else 1.0, out=values[to, : len(at)])
                # The norm is not finite if any element is not, even one that is not sent.
                seen += [M.norm(math.inf), *tile.in_own_range([values[to]])]
                of_ranks.append(at)
            sent.append(of_ranks)
            parts.append(slot.part(values))
        answers, (flags,) = yield (
            ReduceScatter(*parts, average=True, last=True),
            AllToAll(Flags.of(seen, ranks), last=True),
        )

        if bucket.keeps:
            finite = yield Judge(flags)
            for slot, of_ranks in zip(bucket.slots, sent, strict=True):
                for tile, chosen in zip(slot.shards, of_ranks, strict=True):
                    if chosen is not None:
                        tile.keep(tile.form().index_fill_(0, chosen, 0.0), finite)
        for slot, of_ranks, mean in zip(bucket.slots, sent, answers, strict=True):
            own = of_ranks[rank]
            if own is not None:
                slot.mean.zero_().index_copy_(0, own, mean[: len(own)].to(slot.mean.dtype)).add_(flags.sum())
