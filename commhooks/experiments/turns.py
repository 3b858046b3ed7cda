"""The order of turns within a round, and the times of the slowest rank."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

K = TypeVar("K", bound=Hashable)


def drawn(number: int, names: list[K]) -> Sequence[K]:
    """Return a random order, different in each round and the same on all ranks."""
    return random.Random(number).sample(names, len(names))


def on_slowest(seconds: Sequence[float]) -> list[float]:
    """Return the maximum over ranks of each of these times; every rank calls this."""
    together = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(together, dist.ReduceOp.MAX)
    slowest: list[float] = together.tolist()
    return slowest
