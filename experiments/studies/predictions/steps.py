"""Real steps on hosts with links of a rate, under several hooks in turns, and steps without communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from experiments.cluster import Cluster, hosts_on, set_rate
from experiments.launch import Send, run_world
from experiments.links.link import LinkSettings
from experiments.machine import dilation
from experiments.runs import RunSettings
from experiments.specs import Spec
from experiments.tasks import load_task
from experiments.training.registration import register

from .compute import ComputeClock, ComputeTimes

_WARM_UP = 3  # turns that are not counted
_TIMEOUT = 120.0  # seconds without a finished rate


@dataclass(frozen=True, kw_only=True)
class World:
    """A task on hosts of one rank each, at several rates."""

    task: str
    ranks: int
    hooks: tuple[str, ...]
    rates: tuple[float, ...]  # bits per second, as reported
    turns: int = 9
    kind: str = "hosts"  # or "emulated"


@dataclass(frozen=True)
class Steps:
    """The seconds of each step at one rate, as reported: on ranks with a core each."""

    world: World
    rate: float
    compute: float  # forward and backward pass, without communication; median of each step's slowest rank
    optimizer: float
    seconds: dict[str, tuple[float, ...]]  # of each hook's steps, the mean over the ranks


def measure_steps(world: World, tell: Callable[[str], None]) -> list[Steps]:
    """Return the steps at each rate. With fewer cores than ranks, links and reported times are slowed down alike.

    Raises:
        WorldError: A rank failed.

    """
    found: list[Steps] = []
    with hosts_on(LinkSettings(kind=world.kind), world.ranks) as cluster:
        hear = lambda message: found.append(message) if isinstance(message, Steps) else tell(str(message))
        run_world(_take, world.ranks, (world, cluster), hear, timeout=_TIMEOUT, cluster=cluster)
    return found


def _take(rank: int, ranks: int, argument: tuple[World, Cluster | None], send: Send) -> None:
    torch.set_num_threads(1)
    world, cluster = argument
    alone = load_task(Spec.parse(world.task, "task"))
    clock = ComputeClock(alone, None)
    clock.warm_up(alone.batch(0, rank, ranks))
    for rate in world.rates:
        set_rate(cluster, rank, rate / dilation(ranks))
        training = [_Training(world, hook, rate) for hook in world.hooks]
        spent = torch.zeros(world.turns, len(training), dtype=torch.float64)
        for turn in range(-_WARM_UP, world.turns):
            batch = alone.batch(turn + _WARM_UP, rank, ranks)
            if turn >= 0:
                dist.barrier()
                clock.step(batch)
            taken = [one.step(batch) for one in training]
            if turn >= 0:
                spent[turn] = torch.tensor(taken)
        compute = clock.take(partial(dist.all_reduce, op=dist.ReduceOp.MAX))
        dist.all_reduce(spent)
        for one in training:
            one.registered.detach()
        del one, training
        if rank == 0:
            send(_reported(world, rate, compute, spent / ranks))
    del clock  # a DDP must go before its process group does


def _reported(world: World, rate: float, compute: ComputeTimes, spent: torch.Tensor) -> Steps:
    slow = dilation(world.ranks)
    by_hook = zip(world.hooks, (spent / slow).T.tolist(), strict=True)
    return Steps(
        world, rate, compute.seconds / slow, compute.optimizer / slow, {hook: tuple(each) for hook, each in by_hook}
    )


class _Training:
    """A model of its own under one hook."""

    def __init__(self, world: World, hook: str, rate: float) -> None:
        task = Spec.parse(world.task, "task")
        link = LinkSettings(kind=world.kind, bits_per_second=rate)
        settings = RunSettings(task=task, hook=Spec.parse(hook), ranks=world.ranks, link=link)
        self.task = load_task(task)
        self.registered = register(settings, self.task.model, dilation(world.ranks))
        self.optimizer = self.task.optimizer()

    def step(self, batch: Any) -> float:
        """Return the seconds of a step, which all ranks begin together."""
        dist.barrier()
        begun = time.perf_counter()
        self.task.loss(self.registered.ddp, batch).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begun
        self.optimizer.zero_grad()
        return seconds
