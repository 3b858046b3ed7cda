"""What the tests of a ZeroRedundancyOptimizer in a checkpoint run on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adam, Optimizer

import commhooks
from commhooks import CheckpointError
from tests.commhooks.models import Given, wrap

Make = Callable[..., Optimizer]
SHAPES = [(6, 8), (8,), (8, 8), (8,), (3, 8)]


class Run:
    """One rank's run, on gradients that depend on the step and the rank alone."""

    def __init__(self, kind: str, rank: int, make: Make) -> None:
        torch.manual_seed(0)
        self.rank, self.step = rank, 0
        self.ddp = wrap(kind, Given(*SHAPES))
        self.optimizer = make(self.ddp.parameters(), lr=0.05)
        self.hooks = commhooks.attach(self.ddp, commhooks.make_compressor("powersgd", rank=1))

    def train(self, steps: int) -> list[Tensor]:
        """Return the parameters after as many more steps."""
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(10 * self.step + self.rank)
            self.optimizer.zero_grad()
            self.ddp(*(torch.randn(shape, generator=generator) for shape in SHAPES)).backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]

    def save(self, folder: Path) -> None:
        commhooks.save_checkpoint(
            folder, step=self.step, model=self.ddp, optimizer=self.optimizer, hooks=self.hooks, flush=False
        )

    def resume(self, folder: Path) -> Run:
        loaded = commhooks.load_checkpoint(folder, model=self.ddp, optimizer=self.optimizer, hooks=self.hooks)
        assert loaded is not None
        self.step = loaded.step
        return self


def resumed(rank: int, kind: str, folder: str) -> tuple[dict[str, bool], str]:
    """Return whether runs that were interrupted twice end as one that was not, and what another optimizer is told."""
    whole, sharded = Adam, functools.partial(ZeroRedundancyOptimizer, optimizer_class=Adam)
    first = Run(kind, rank, sharded)
    first.train(2)
    first.save(Path(folder, "first"))
    first.train(2)
    first.save(Path(folder, "second"))  # the state collected for the save before is out of date by now
    expected = first.train(2)
    ends = {}
    for name, make, then in (("sharded", sharded, sharded), ("whole", whole, whole), ("changing", sharded, whole)):
        middle = Run(kind, rank, make).resume(Path(folder, "first"))
        middle.train(2)
        middle.save(Path(folder, name))
        for start in ("second", name):
            got = Run(kind, rank, then).resume(Path(folder, start)).train(2)
            ends[f"{name} from {start}"] = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    other = Run(kind, rank, functools.partial(ZeroRedundancyOptimizer, optimizer_class=SGD))
    try:
        other.resume(Path(folder, "second"))
    except CheckpointError as error:
        return ends, str(error)
    return ends, ""
