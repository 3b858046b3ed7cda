"""Ranks that are devices of this process, whose engines are handed buckets directly, and what is seen as they run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.communicators.kernels import Kernels
from commhooks.devices import SideStream
from commhooks.engine.engine import Engine
from commhooks.language import Compressor
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.inline import InlineScheduler
from commhooks.scheduling.policy import PolicyName
from tests.commhooks.models import Shape
from tests.commhooks.workers import GivenBucket, flat
from tests.virtual_device import ranks
from tests.virtual_device.backends import LockstepGroup
from tests.virtual_device.device import HostWait, begin, report

Futures = list[list[torch.futures.Future[Tensor]]]
"""Of each rank's means, by bucket."""


class DeviceConnection:
    """One rank's connection over a lockstep group, on a side stream of its own, as over NCCL; see `Connection`."""

    def __init__(self, group: LockstepGroup, policy: PolicyName, hook_timeout: float | None) -> None:
        self.rank, self.world_size, self.policy = group.rank(), group.size(), policy
        self.scheduler: InlineScheduler | None = None
        self._communicator = ProcessGroupCommunicator(group, has_tensor_forms=True)
        self._hook_timeout = hook_timeout
        self._joined = Counter[str]()

    def carries_groups(self, device: torch.device) -> bool:
        """Return False, as over NCCL."""
        return False

    def join(self, name: str = "") -> int:
        """Reserve a channel, and return how many of its name were reserved before."""
        self._joined[name] += 1
        return self._joined[name] - 1

    def check_ranks(self) -> None:
        """Do nothing: the ranks stay."""

    def open(self, channel: ConnectionChannel, device: torch.device, fingerprint: str) -> InlineScheduler:
        """Open a reserved channel; ranks of one process are given the same fingerprint."""
        if self.scheduler is None:
            self.scheduler = InlineScheduler(
                self._communicator, _agree, (SideStream(device), SideStream(device)), self._hook_timeout
            )
        self.scheduler.open(channel, fingerprint)
        return self.scheduler

    def leave(self) -> None:
        """Stop what waits for the device, if anything does."""
        if self.scheduler is not None:
            self.scheduler.stop()


def _agree(terms: str, kernels: Kernels) -> None:
    """Find that every rank has come with the same."""


class DeviceWorld:
    """Every rank's engine on its own device, for parameters of these shapes dealt out to so many buckets.

    Settings are those of `Engine`. The host waits for nothing here: gradients are copied to the devices as they are
    needed, and means stay there. (With `may_join` engines look at each bucket, which is outside a backward pass.)
    Engines of worlds `beside` each other have channels on the same connections.
    """

    def __init__(
        self,
        compressor: Compressor,
        world_size: int,
        shapes: Sequence[Shape],
        *,
        buckets: int = 3,
        policy: PolicyName = "fifo",
        storage: Any = "fp32",
        hook_timeout: float | None = None,
        dtype: torch.dtype = torch.float32,
        may_be_unused: bool = False,
        may_join: bool = False,
        beside: DeviceWorld | None = None,
        **settings: Any,
    ) -> None:
        self.world_size = world_size
        self.dealt = [list(range(len(shapes)))[bucket::buckets] for bucket in range(buckets)]
        self.engines: list[Engine] = []
        self.parameters: list[list[Tensor]] = []
        self.memories: list[list[Tensor]] = []
        for rank, group in enumerate(LockstepGroup.world(world_size)):
            device = torch.device("cuda", rank)
            own = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            connection = (
                beside.engines[rank].connection if beside is not None else DeviceConnection(group, policy, hook_timeout)
            )
            engine = Engine(compressor, connection, residuals=storage, may_join=may_join, **settings)
            engine.bind([(f"layer{i}", parameter) for i, parameter in enumerate(own)], may_be_unused=may_be_unused)
            self.engines.append(engine)
            self.parameters.append(own)
            sizes = [sum(own[i].numel() for i in members) for members in self.dealt]
            self.memories.append([torch.zeros(size, dtype=dtype, device=device) for size in sizes])

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Average gradients[rank][parameter], which are on the CPU; return each rank's means, in the same form.

        The means are on the devices, queued behind the step.
        """
        return self.means(self.submit(gradients))

    @torch.no_grad()
    def submit(self, gradients: Sequence[Sequence[Tensor]]) -> Futures:
        """Hand a step's buckets in, of all ranks in turn; return each rank's futures of means, by bucket."""
        futures: Futures = [[] for _ in self.engines]
        for number, members in enumerate(self.dealt):
            for rank, engine in enumerate(self.engines):
                with torch.cuda.device(rank):
                    memory, owners = self.memories[rank][number], [self.parameters[rank][i] for i in members]
                    parts = [flat(gradients[rank][i], owner) for i, owner in zip(members, owners, strict=True)]
                    memory.copy_(torch.cat(parts).to(memory.device, non_blocking=True))
                    is_last = number == len(self.dealt) - 1
                    futures[rank].append(engine.run(GivenBucket(number, memory, owners, is_last=is_last)))
        return futures

    @torch.no_grad()
    def means(self, futures: Futures) -> list[list[Tensor]]:
        """Let every rank's current stream wait for its means, and copy them."""
        return [self._means(rank, own) for rank, own in enumerate(futures)]

    def _means(self, rank: int, futures: Sequence[torch.futures.Future[Tensor]]) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        with torch.cuda.device(rank):
            for future, members in zip(futures, self.dealt, strict=True):
                parts = future.wait().clone().split([self.parameters[rank][i].numel() for i in members])
                means |= dict(zip(members, parts, strict=True))
        return [means[i].view(parameter.shape) for i, parameter in enumerate(self.parameters[rank])]

    def state(self) -> list[Tensor]:
        """Wait for all devices, and return every rank's state on the CPU."""
        for rank in range(self.world_size):
            torch.cuda.synchronize(rank)
        states = [state.tensors for engine in self.engines for state in engine.state.states()]
        return [kept.to("cpu", copy=True) for tensors in states for kept in tensors.values()]

    def stop(self) -> None:
        """Close every channel."""
        for engine in self.engines:
            engine.stop()


@dataclass(frozen=True)
class Seen:
    """What a run under one schedule computed, and what the device reports of it."""

    values: list[Tensor]
    """On the CPU; none after an error."""
    error: str
    """The one that ended the run, or nothing."""
    races: tuple[str, ...]
    waits: Counter[HostWait]
    """Of code outside tests."""
    kernels: int

    def equals(self, other: Seen) -> bool:
        """Return whether both computed the same bits; NaN is one value."""
        if len(self.values) != len(other.values):
            return False
        return all(
            ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
            for ours, theirs in zip(self.values, other.values, strict=True)
        )


def see(program: Callable[[], list[Tensor]], run: str, eagerness: float = 0.3) -> Seen:
    """Run a program under a schedule, such as "late" or "random:1"; it returns tensors on any device."""
    begin(*ranks.parse(run), eagerness)
    values, error = [], ""
    try:
        values = [value.cpu() for value in program()]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    try:
        found = report()
    except RuntimeError as raised:  # the device cannot go on
        error = error or f"{type(raised).__name__}: {raised}"
        found = report()
    gc.collect()
    begin("eager")
    tested = {wait: count for wait, count in found.host_waits.items() if _is_tested(wait.place)}
    return Seen(values, error, found.races, Counter(tested), found.kernels)


def _is_tested(place: str) -> bool:
    """Return whether a place is in what is tested, for which mutants stand in."""
    return "/tests/" not in place or "/tests/virtual_device/mutants.py:" in place


def steps(
    make: Callable[[], DeviceWorld],
    gradients: Sequence[Sequence[Sequence[Tensor]]],
    between: Callable[[DeviceWorld, int], None] | None = None,
) -> list[Tensor]:
    """Make a world and take a step with each of `gradients[step]`, after `between(world, step)`.

    Return all means and the final state. The host waits for nothing before the last step is queued.
    """
    world, means = make(), []
    try:
        for step, given in enumerate(gradients):
            if between is not None:
                between(world, step)
            means += [mean for own in world.step(given) for mean in own]
        return [*means, *world.state()]
    finally:
        world.stop()
