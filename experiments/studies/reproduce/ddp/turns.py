"""What the DDP paper's timings share: ranks on a link, models in their DDPs, and steps that are timed in turns.

Models that are compared are in memory together, on the same ranks, and take a step each in turn: any other load on the
machine slows all of them equally. All ranks begin a step together, and it counts as it was on the rank that took
longest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.launch import Send, run_on_link
from experiments.links.link import LinkSettings, Wire, parse_rate
from experiments.links.linked_group import LinkedGroup
from experiments.links.waits import WaitClock
from experiments.specs import Spec
from experiments.tasks import LoadedTask, load_task
from experiments.training.measure import StepClock
from experiments.training.registration import wrap_in_ddp

from .hooks import Groups

MODELS = {"ResNet-18": "digits:network=resnet18,batch_size=16", "GPT": "gpt:size=base,batch_size=4"}
"""A convolutional network of 11.2 million parameters and a transformer of 4.1 million: the tasks, by name."""
TINY_MODELS = {"GPT": "gpt:size=tiny"}
DDPS = {"core": "ddp_core", "torch": "PyTorch's DDP"}
LOOPBACK = "loopback"

_WARM_UP = 3  # steps of every model before its first turn: DDPs rebuild their buckets after the first one


class Taken(TypedDict):
    """One entrant's turns: the seconds of each step's parts."""

    buckets: int
    forward: list[float]
    backward: list[float]  # until the last gradient: compute
    exposed: list[float]  # the rest of the backward pass: waiting for communication, and copying its results
    optimizer: list[float]


PARTS = ("forward", "backward", "exposed", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A model in its DDP, which takes turns with others."""

    task: str
    ddp: str = "core"  # "core": ddp_core's DistributedDataParallel; "torch": PyTorch's
    bucket_mib: float | None = None  # None: the DDP's default
    register: Callable[[Any, Groups], None] | None = None  # registers a hook, over these groups; None: no hook


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Who takes turns, and where."""

    entrants: tuple[Entrant, ...]
    link: LinkSettings
    ranks: int
    count: int  # turns that each one takes
    groups: int = 1  # process groups, which share the link


def take_turns(turns: Turns, tell: Callable[[str], None]) -> list[Taken]:
    """Return the seconds of every entrant's steps, in the entrants' order.

    Raises:
        WorldError: A rank failed.

    """
    taken: list[Taken] = run_on_link(_take_turns, turns.ranks, turns, turns.link, tell)[-1]
    return taken


def link_of(place: str, kind: str) -> LinkSettings:
    """Return the link of a place: the loopback, or links of a kind with a rate such as '1 Gbit/s'."""
    return LinkSettings() if place == LOOPBACK else LinkSettings(kind=kind, bits_per_second=parse_rate(place))


def place_in_words(place: str) -> str:
    """Return 'Over the loopback' or 'At 1 Gbit/s'."""
    return "Over the loopback" if place == LOOPBACK else f"At {place}"


def groups_on(link: LinkSettings, count: int = 1) -> list[dist.ProcessGroup]:
    """Return process groups of all ranks, the default one first; every rank calls this.

    On an emulated link with a rate they share one wire, as those of hosts share the host's link.
    """
    world = dist.group.WORLD
    assert world is not None, "run_world has made the default group"
    plain = [world, *(dist.new_group() for _ in range(count - 1))]
    if link.kind != "emulated" or link.bits_per_second is None:
        return plain
    wire = Wire(link)
    return [LinkedGroup(group, wire) for group in plain]


def end_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """End what `groups_on` started; DDPs on these groups must be gone."""
    gc.collect()  # a DDP that outlives its process group may abort the process
    for group in groups:
        if isinstance(group, LinkedGroup):
            group.close()


def load_without_broadcasts(task: str) -> LoadedTask:
    """Return a task whose model's buffers are not broadcast before each forward pass: a DDP sends only gradients."""
    loaded = load_task(Spec.parse(task, "task"))
    names = [name for name, _ in loaded.model.named_buffers()]
    loaded.model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]  # 'expression has type "list[str]"'
    return loaded


def whole(taken: Taken) -> list[float]:
    """Return the seconds of each step."""
    parts = (taken["forward"], taken["backward"], taken["exposed"], taken["optimizer"])
    return [sum(step) for step in zip(*parts, strict=True)]


def _take_turns(rank: int, ranks: int, turns: Turns, send: Send) -> None:
    """Take all turns on one rank; rank 0 sends what they took on the slowest."""
    torch.set_num_threads(1)
    groups = groups_on(turns.link, turns.groups)
    training = [_Training(entrant, groups) for entrant in turns.entrants]
    spent = torch.zeros(len(training), turns.count, len(PARTS), dtype=torch.float64)
    for turn in range(-_WARM_UP, turns.count):
        for place, one in enumerate(training):
            parts = one.step(turn + _WARM_UP, rank, ranks)
            if turn >= 0:
                spent[place, turn] = torch.tensor(parts)
        if rank == 0:
            send(f"  warming up, {-turn} to go" if turn < 0 else f"  {turn + 1} of {turns.count} turns")
    everyone = [torch.empty_like(spent) for _ in range(ranks)]
    dist.all_gather(everyone, spent)
    if rank == 0:
        slowest = of_slowest(torch.stack(everyone))
        send([one.taken(parts) for one, parts in zip(training, slowest, strict=True)])
    for one in training:
        one.close()
    del one, training
    end_groups(groups)


def of_slowest(spent: Tensor) -> Tensor:
    """Return the parts of each step on the rank where it took longest: entrants x turns x parts, without ranks."""
    slowest = spent.sum(dim=-1).argmax(dim=0)  # entrants x turns
    return spent.gather(0, slowest[None, :, :, None].expand(1, -1, -1, spent.shape[-1]))[0]


class _Training:
    """One entrant on one rank."""

    def __init__(self, entrant: Entrant, groups: Groups) -> None:
        self.task = load_without_broadcasts(entrant.task)
        self.ddp = wrap_in_ddp(self.task.model, entrant.ddp, entrant.bucket_mib, groups[0])
        if entrant.register is not None:
            entrant.register(self.ddp, groups)
        self.optimizer = self.task.optimizer()
        self.clock = StepClock(self.ddp, self.task.model, WaitClock())

    def step(self, number: int, rank: int, ranks: int) -> list[float]:
        """Take a step, and return the seconds of its parts."""
        batch = self.task.batch(number, rank, ranks)
        dist.barrier()
        self.clock.begin()
        begun = time.perf_counter()
        loss = self.task.loss(self.ddp, batch)
        forward_ended = time.perf_counter()
        loss.backward()
        self.clock.backward_ended()
        backward_ended = time.perf_counter()
        self.optimizer.step()
        split = self.clock.end()
        self.optimizer.zero_grad()
        forward, optimizer = forward_ended - begun, begun + split.seconds - backward_ended
        return [forward, split.compute - forward - optimizer, split.compression + split.waiting, optimizer]

    def taken(self, spent: Tensor) -> Taken:
        """Return the turns that took this long, turns x parts."""
        sizes: str = self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # type: ignore[operator]  # '"Tensor" not callable'
        forward, backward, exposed, optimizer = spent.T.tolist()
        return Taken(
            buckets=len(sizes.split(",")), forward=forward, backward=backward, exposed=exposed, optimizer=optimizer
        )

    def close(self) -> None:
        """Remove everything from the model: its DDP must go before the process groups do."""
        self.clock.remove()
        del self.ddp
