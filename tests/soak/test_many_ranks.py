"""16 ranks on one machine: right means, and costs that do not grow with the square of the ranks unless said.

`make many-ranks` prints the table of docs/guide/ddp_core.md.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.testing.workers import Workers
from ddp_core import DistributedDataParallel
from tests.soak.counted_store import Relay, open_counted
from tests.world import run_world

SIZES = (4, 8, 16)
STEPS = 20
SECONDS = 200.0
COMPRESSORS = ("powersgd", "int8")
CLASSES: dict[str, type[nn.Module]] = {
    "ddp_core": DistributedDataParallel,
    "PyTorch's DDP": nn.parallel.DistributedDataParallel,
}


class Cost(NamedTuple):
    """What a part of a run took: seconds, and the store's keys, bytes and connections, of all ranks together."""

    seconds: float
    keys: float
    moved_bytes: float
    connections: int


class Meter:
    """Measures parts of a run that every rank goes through."""

    def __init__(self, relay: Relay | None) -> None:
        self._relay = relay
        self.costs: dict[str, Cost] = {}

    @contextmanager
    def part(self, name: str, times: int = 1) -> Iterator[None]:
        """Measure the body; keys and bytes are divided by `times`, the steps in it."""
        self._meet()
        before, start = self._look(), time.perf_counter()
        self._meet()
        yield
        self._meet()
        seconds, after = time.perf_counter() - start, self._look()
        keys, moved, connections = (new - old for new, old in zip(after, before, strict=True))
        self.costs[name] = Cost(seconds / times, keys / times, moved / times, connections)
        self._meet()

    def _meet(self) -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # not a barrier, which may use the store

    def _look(self) -> tuple[int, int, int]:
        if self._relay is None:
            return 0, 0, 0
        return self._relay.keys(), self._relay.moved_bytes, self._relay.connections


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def backward(module: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, labels = torch.randn(16, 32, generator=generator), torch.randint(10, (16,), generator=generator)
    module.zero_grad()
    nn.functional.cross_entropy(module(inputs), labels).backward()


def check_replicas(module: nn.Module) -> None:
    own = torch.cat([p.detach().flatten() for p in module.parameters()])
    lowest, highest = own.clone(), own.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest), "replicas differ"


def run(rank: int, world_size: int, folder: str) -> dict[str, Cost]:
    """Train with every class and compressor; return the costs of each part."""
    store, relay = open_counted(rank, world_size, Path(folder), SECONDS)
    meter = Meter(relay)
    with meter.part("init_process_group (PyTorch)"):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS)
        )
        dist.all_reduce(torch.zeros(1))
    for kind, cls in CLASSES.items():
        for compressor in COMPRESSORS:
            name = f"{kind}, {compressor}"
            with meter.part(f"{name}: wrap"):
                ddp = cls(model())
            with meter.part(f"{name}: attach, first step"):
                handle = commhooks.attach(ddp, compressor)
                backward(ddp, rank, 0)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            optimizer.step()
            with meter.part(f"{name}: a step", STEPS):
                for step in range(1, 1 + STEPS):
                    backward(ddp, rank, step)
                    optimizer.step()
            check_replicas(ddp)
            inner: Any = ddp.module
            with meter.part(f"{name}: the guard's proof"):
                backward(inner, rank, 1 + STEPS)
                with pytest.raises(commhooks.NotAveragedError):
                    optimizer.step()
            handle.close()
            check_lockstep(cls, compressor, rank, world_size)
            del ddp, handle, optimizer
            gc.collect()
    return meter.costs


def check_lockstep(cls: Any, compressor: str, rank: int, world_size: int) -> None:
    """Compare the first means of a new model with those of workers in lockstep, given every rank's gradients."""
    ddp, replica = cls(model()), model()
    handle = commhooks.attach(ddp, compressor)
    names, parameters = zip(*ddp.module.named_parameters(), strict=True)
    workers = Workers(commhooks.make_compressor(compressor), world_size, [p.detach() for p in parameters], list(names))
    for step in range(3):
        every = []
        for other in range(world_size):
            backward(replica, other, step)
            every.append([p.grad.clone() for p in replica.parameters() if p.grad is not None])
        backward(ddp, rank, step)
        for name, parameter, mean in zip(names, parameters, workers.step(every)[rank], strict=True):
            torch.testing.assert_close(parameter.grad, mean, rtol=2e-3, atol=2e-5, msg=f"{name} in step {step}")
    handle.close()


def ranks(world_size: int, folder: Path) -> dict[str, Cost]:
    """Run one world; return rank 0's costs, which are all ranks' but for the seconds."""
    folder.mkdir()
    costs: dict[str, Cost] = run_world(
        run, world_size, world_size, str(folder), backend=None, check_exit=False, timeout=SECONDS
    )[0]
    return costs


@pytest.mark.soak
@pytest.mark.timeout(4 * SECONDS)
def test_sixteen_ranks_are_right_and_cost_no_square_of_the_ranks(tmp_path: Path) -> None:
    costs = {size: ranks(size, tmp_path / str(size)) for size in SIZES}
    print(f"\n| all ranks together | {' | '.join(f'{size} ranks' for size in SIZES)} |")
    print(f"| --- {'| --- ' * len(SIZES)}|")
    for part in costs[SIZES[0]]:
        cells = [
            f"{c.seconds:.3g} s, {c.keys:.4g} keys, {c.moved_bytes:,.0f} bytes, {c.connections} connections"
            for c in (costs[size][part] for size in SIZES)
        ]
        print(f"| {part} | {' | '.join(cells)} |")
    for part, least in list(costs[SIZES[0]].items())[1:]:  # the first is PyTorch's own
        most = costs[SIZES[-1]][part]
        times = SIZES[-1] / SIZES[0]
        assert most.keys <= times * least.keys, f"{part}: keys grow faster than the ranks"
        assert most.connections <= times * least.connections, f"{part}: connections grow faster than the ranks"
        if part.endswith("a step"):
            assert most.keys == 0, f"{part}: a step leaves keys in the store"
