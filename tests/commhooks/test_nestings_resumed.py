"""Thirty nestings for each number of ranks, saved and resumed on ddp_core's DDP.

A resumed run has a model and a handle of its own, and continues bit for bit: means, parameters, state and bytes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import Compressor, ErrorFeedback, Hierarchical, PerParameter, StartAfter, WireDtype
from tests.commhooks.models import wrap
from tests.commhooks.nestings import SHAPES, drawn, every_one_in
from tests.commhooks.resuming import Run, distance, roundtrip
from tests.commhooks.workers import normal
from tests.tiers import thorough
from tests.world import run_world

NUMBER = 30
WORLD_SIZES = (2, 3, 4)
WRAPPERS = {ErrorFeedback, Hierarchical, PerParameter, StartAfter, WireDtype}
TENSORS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
MORE = 4
"""Steps after the save; what is scheduled begins in the sixth at the latest."""

pytestmark = pytest.mark.kernels


@dataclasses.dataclass(frozen=True)
class Row:
    """A nesting, and how it is run: every third takes over from another in the step before the save."""

    number: int
    compressor: Compressor
    before: Compressor | None
    saved_after: int
    """At least two steps: in the first a DDP has not split its buckets yet (docs/guide/checkpoints.md)."""
    policy: Any

    def announce(self, handle: Any) -> None:
        """Have a handle load state of the compressor before this one, too."""
        if self.before:
            handle.expect(self.before)

    def __str__(self) -> str:
        return f"{self.number}: {self.compressor}, {self.policy}, saved after {self.saved_after}, before: {self.before}"


def row_of(world_size: int, number: int) -> Row:
    """Return a nesting for so many ranks: of two kinds of wrapper at least."""
    draw = random.Random(1000 * world_size + number)
    while True:
        compressor = drawn(draw, TENSORS, world_size)
        if len({*map(type, every_one_in(compressor))} & WRAPPERS) >= 2:
            break
    before = drawn(draw, TENSORS, world_size) if number % 3 == 2 else None
    return Row(number, compressor, before, draw.randint(2, 6), draw.choice(("fifo", "fused")))


def rows_of(world_size: int) -> list[Row]:
    """Return all nestings for so many ranks: no two are alike, and each wrapper is in some."""
    rows = [row_of(world_size, number) for number in range(NUMBER)]
    assert len({str(row.compressor) for row in rows}) == NUMBER
    assert {type(one) for row in rows for one in every_one_in(row.compressor)} >= WRAPPERS
    return rows


def counts(handle: Any, before: Sequence[int] = (0, 0, 0, 0)) -> list[int]:
    """Return what a handle has sent, less what it had sent before."""
    now = handle.statistics()
    sent = now.collectives, now.payload_elements, now.payload_bytes, now.moved_bytes
    return [one - other for one, other in zip(sent, before, strict=True)]


class Pulled(nn.Module):
    """Parameters of the nestings' names, whose gradients are what is given and what they are."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in TENSORS.items():
            holder: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(last, nn.Parameter(tensor.clone()))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * gradient).sum() + p.square().sum() / 2 for p, gradient in pairs]).sum()


def begun(row: Row, compressor: Compressor) -> Run:
    ddp = wrap("core", Pulled(), bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    return Run(ddp, optimizer, commhooks.attach(ddp, compressor, policy=row.policy))


def trained(run: Run, rank: int, ranks: int, first: int, last: int) -> list[Tensor]:
    """Make some steps, and return each one's means."""
    means = []
    for step in range(first, last):
        run.optimizer.zero_grad()
        run.ddp(normal(list(run.ddp.parameters()), ranks, seed=step)[rank]).backward()
        means += [p.grad.clone() for p in run.ddp.parameters()]
        run.optimizer.step()
    return means


def on_every_rank(rank: int, world_size: int, rows: Sequence[Row], folder: str) -> None:
    """Save and resume every row, by turns with a checkpoint's files and with the state alone."""
    for row in rows:
        print(row, flush=True)
        whole = begun(row, row.before or row.compressor)
        hooks: Any = whole.hooks
        trained(whole, rank, world_size, 0, row.saved_after - 1)
        if row.before:
            hooks.replace(row.compressor)
        trained(whole, rank, world_size, row.saved_after - 1, row.saved_after)
        path, in_files = Path(folder) / str(row.number), row.number % 2 == 0
        parts: dict[str, Any] = {"model": whole.ddp, "optimizer": whole.optimizer, "hooks": hooks}
        if in_files:
            commhooks.save_checkpoint(path, step=row.saved_after, flush=False, **parts)
        states = roundtrip({name: part.state_dict() for name, part in parts.items()})
        before = counts(hooks)
        theirs = trained(whole, rank, world_size, row.saved_after, row.saved_after + MORE)

        resumed = begun(row, row.compressor)
        row.announce(resumed.hooks)
        parts = {"model": resumed.ddp, "optimizer": resumed.optimizer, "hooks": resumed.hooks}
        if in_files:
            commhooks.load_checkpoint(path, **parts)
        else:
            for name, part in parts.items():
                part.load_state_dict(states[name])
        ours = trained(resumed, rank, world_size, row.saved_after, row.saved_after + MORE)
        assert distance(ours, theirs) == 0, f"means of {row}"
        assert distance(resumed.result(), whole.result()) == 0, f"parameters or state of {row}"
        assert counts(resumed.hooks) == counts(hooks, before), f"bytes of {row}"
        for run in (whole, resumed):
            run.hooks.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "rows"), [(2, 3), *thorough((ranks, NUMBER) for ranks in WORLD_SIZES)])
def test_a_resumed_nesting_is_the_one_that_went_on(world_size: int, rows: int, tmp_path: Path) -> None:
    run_world(on_every_rank, world_size, world_size, rows_of(world_size)[:rows], str(tmp_path), timeout=280.0)
