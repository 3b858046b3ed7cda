"""The splitting of a resumed run's first buckets, as in the previous run.

A DistributedDataParallel begins with one bucket, and splits it only after its first step (in a static graph, its
second). Those steps of a resumed run would have a different layout than in the previous run, so with three or more
ranks the last bits of sums would differ, and a compressor that treats a whole bucket as one matrix would see another
matrix. Except on GPUs, that bucket is split here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.devices import runs_later
from commhooks.engine.buckets import Bucket
from commhooks.state.table import StateTable


class Resumed:
    """The plan by which a resumed run splits the buckets of its first steps, and the fingerprint that ranks compare."""

    def __init__(self, fingerprint: str = "", plan: Sequence[Sequence[str]] = (), steps: int = 0) -> None:
        self.fingerprint = fingerprint
        self.plan: Sequence[Sequence[str]] = plan
        self._steps_left = steps

    def end_step(self) -> None:
        """Count a step; after the last one, buckets are taken as they come."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.plan = ()

    def parts_of(self, bucket: Bucket, table: StateTable) -> list[BucketPart]:
        """Return a bucket's parts; empty if it is not split, or the plan has the same bucket.

        A part may be the whole bucket, with its parameters in the order of their first backward pass.
        """
        memory, parameters = bucket.buffer(), bucket.parameters()
        if (
            memory.is_sparse
            or runs_later(memory)
            or memory.dim() > 1
            or hasattr(bucket, "output")
            or sum(p.numel() for p in parameters) != memory.numel()
        ):
            return []
        names = [table.name_of(parameter) for parameter in parameters]
        within = [names_of_one for names_of_one in self.plan if set(names_of_one) <= set(names)]
        if within == [names] or sorted(name for one in within for name in one) != sorted(map(str, names)):
            return []
        places = memory.detach().split([parameter.numel() for parameter in parameters])
        found: dict[Any, tuple[Tensor, Tensor]] = dict(zip(names, zip(parameters, places, strict=True), strict=True))
        parts = []
        for one in within:
            members, own = zip(*(found[name] for name in one), strict=True)
            parts.append(BucketPart(bucket, torch.cat(own), list(members), own, ends=one is within[-1]))
        return parts


@dataclasses.dataclass(frozen=True, eq=False)
class BucketPart:
    """A part of a bucket that acts as a bucket itself, with its own memory."""

    whole: Bucket
    memory: Tensor
    members: list[Tensor]
    places: Sequence[Tensor]
    """The views of its parameters' gradients in the whole bucket's memory."""
    ends: bool
    """True for the whole bucket's last part."""

    def index(self) -> int:
        """Return the whole bucket's number."""
        return self.whole.index()

    def buffer(self) -> Tensor:
        """Return the memory."""
        return self.memory

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of the memory."""
        return self.members

    def is_last(self) -> bool:
        """Return whether this is the last part of the step's last bucket."""
        return self.ends and self.whole.is_last()

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the memory back into the whole bucket's."""
        parts = self.memory.split([place.numel() for place in self.places])
        torch._foreach_copy_(list(self.places), list(parts))


def put_together(parts: Sequence[BucketPart], memory: Tensor, done: torch.futures.Future[Any]) -> Tensor:
    """Return the whole bucket's mean, or raise the error of one of its parts."""
    for future in done.value():
        future.value()
    for part in parts:
        part.put_back()
    return memory
