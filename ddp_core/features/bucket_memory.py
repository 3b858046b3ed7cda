"""``gradient_as_bucket_view`` and ``lazy_bucket_allocation``: other memory for buckets than a copy that is kept.

For the bits of PyTorch's reducer, a gradient that exists when buckets are laid out is moved into them then, and one
that is in place already is divided, where one from elsewhere is multiplied by the reciprocal.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_core.buckets import Bucket
from ddp_core.feature import Feature
from ddp_core.hooks import Pending
from ddp_core.reducer import Reducer


class ViewBucket(Bucket):
    """A bucket whose memory *is* ``p.grad``: no copy back, and no second copy of all gradients."""

    def __init__(self, index: int, indices: Sequence[int], members: Sequence[Parameter], names: Sequence[str]):
        self._addresses: list[int] = []
        super().__init__(index, indices, members, names)
        self.adopt()

    def allocate(self) -> None:
        """Set memory aside for the gradients."""
        super().allocate()
        self._addresses = [view.data_ptr() for view in self.views]

    @torch.no_grad()
    def adopt(self) -> None:
        """Move gradients that exist when buckets are laid out into this memory, unscaled."""
        for member, view in zip(self.members, self.views, strict=True):
            if member.grad is not None and not member.grad.is_sparse:
                member.grad = view.copy_(member.grad)

    def gather(self, places: Sequence[int], divisor: int | None) -> None:
        """Divide gradients that are in place, and move others here."""
        members, views, inside, outside = self.members, self.views, list[Tensor](), list[int]()
        for place in places:
            grad = members[place].grad
            if grad is not None and grad.data_ptr() == self._addresses[place]:
                inside.append(views[place])
            else:
                outside.append(place)
        super().gather(outside, divisor)
        if inside and divisor is not None:
            self.scale(inside, Tensor.div_, divisor)
        for place in outside:
            if members[place].grad is not None:
                members[place].grad = views[place]

    def scatter(self, mean: Tensor, untouched: Container[int] = ()) -> None:
        """Make gradients that did not exist views of this memory; the others are already."""
        if not self.holds(mean):
            self.flat.copy_(mean)
        for place in self.absent:
            if self.indices[place] not in untouched and self.members[place].grad is None:
                self.members[place].grad = self.views[place]


class LazyBucket(Bucket):
    """A bucket with memory from its first gradient to its mean, so that buckets and activations share memory."""

    def allocate(self) -> None:
        """Wait for the first gradient."""

    def gather(self, places: Sequence[int], divisor: int | None) -> None:
        """Take memory if there is none yet."""
        if not self.views:
            super().allocate()
        super().gather(places, divisor)

    def release(self) -> None:
        """Let go of the memory; gradients that are views of it keep it."""
        self.flat, self.views = self.members[0].new_empty(0), []


class LazyViewBucket(LazyBucket, ViewBucket):
    """Both: gradients keep the memory until ``zero_grad``."""

    def adopt(self) -> None:
        """Leave gradients where they are until there is memory."""


class LazyMemory(Feature):
    """``lazy_bucket_allocation``: a hook gets other memory in every step."""

    def on_mean(self, bucket: Bucket) -> None:
        """Release a bucket as soon as its means have left it."""
        if isinstance(bucket, LazyBucket):
            bucket.release()

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Release the buckets that were left out."""
        for bucket in reducer.layout.buckets:
            self.on_mean(bucket)
