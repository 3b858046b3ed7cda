"""A run whose optimizer shards its state resumes bit for bit, also with an optimizer that does not, and from one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adam, Optimizer

import commhooks
from commhooks import CheckpointError
from tests.commhooks.models import Given, wrap
from tests.tiers import thorough
from tests.world import on_ranks

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


@on_ranks(2)
@pytest.mark.parametrize("kind", thorough(["core", "torch"], unless="core".__eq__))
def test_a_sharded_optimizer_is_saved_as_it_is_now_and_resumes_sharded_or_whole(
    rank: int, kind: str, tmp_path: Path
) -> None:
    """Interrupt runs twice; they end as the one that was not, and another kind of optimizer is refused."""
    whole, sharded = Adam, functools.partial(ZeroRedundancyOptimizer, optimizer_class=Adam)
    first = Run(kind, rank, sharded)
    first.train(2)
    first.save(tmp_path / "first")
    first.train(2)
    first.save(tmp_path / "second")  # the state collected for the save before is out of date by now
    expected = first.train(2)
    for name, make, then in (("sharded", sharded, sharded), ("whole", whole, whole), ("changing", sharded, whole)):
        middle = Run(kind, rank, make).resume(tmp_path / "first")
        middle.train(2)
        middle.save(tmp_path / name)
        for start in ("second", name):
            got = Run(kind, rank, then).resume(tmp_path / start).train(2)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (name, start)
    other = Run(kind, rank, functools.partial(ZeroRedundancyOptimizer, optimizer_class=SGD))
    with pytest.raises(CheckpointError, match="optimizer: saved from Adam, now SGD"):
        other.resume(tmp_path / "second")
