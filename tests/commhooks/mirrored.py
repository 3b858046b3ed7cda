"""A model of several buckets on every rank, whose gradients are handed in, and the same in lockstep."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.language import BucketView, Compressor, Context
from commhooks.language.compressor import Exchange
from commhooks.wrappers.wrapper import Wrapper
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import Workers, largest, zeros

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (4, 3, 5, 5), (60, 60), (7,), (60, 60)]
TINY_BUCKETS = {"bucket_cap_mb": 0.004}


def given(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    return wrap(kind, Given(*SHAPES).to(dtype), **(TINY_BUCKETS | settings))


def backward(model: nn.Module, gradients: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(*gradients).backward()
    return gradients_of(model)


def largest_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return largest(*(a.double() - b.double() for a, b in zip(ours, theirs, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(Wrapper):
    """Note which parameters lie in each bucket that `inner` is given."""

    seen: list[list[str]] = dataclasses.field(compare=False, repr=False)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        self.seen.append([slot.name for slot in bucket.slots])
        return self.inner.compress(bucket, context)


class Mirrored:
    """Train a model of `SHAPES` on every rank, and the same in lockstep, divided into the same buckets."""

    def __init__(
        self,
        kind: str,
        compressor: Compressor,
        policy: Any,
        world_size: int = 2,
        dtype: torch.dtype = torch.float32,
        model: nn.Module | None = None,
    ) -> None:
        self.names = [f"weights.{i}" for i in range(len(SHAPES))]
        self.seen: list[list[str]] = []
        self.model = model or given(kind, dtype)
        self.attachment = commhooks.attach(self.model, Watched(inner=compressor, seen=self.seen), policy=policy)
        self.workers = Workers(compressor, world_size, zeros(*SHAPES, dtype=dtype), names=self.names, policy=policy)

    def replace(self, compressor: Compressor) -> None:
        self.attachment.replace(Watched(inner=compressor, seen=self.seen))
        for engine in self.workers.engines:
            engine.replace(compressor, torch.device("cpu"))

    def step(self, gradients: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients' means on this rank, and what they are in lockstep."""
        ours = backward(self.model, gradients[dist.get_rank()])
        return ours, self.lockstep(gradients)[dist.get_rank()]

    def lockstep(self, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return every worker's means of the step that the model has just made.

        The workers' parameters are dealt out anew if the DDP's were: it rebuilds its buckets after the first step.
        """
        dealt = [[self.names.index(name) for name in names] for names in self.seen]
        self.seen.clear()
        if self.workers.dealt != dealt:
            self.workers.deal(dealt)
        return self.workers.step(gradients)
