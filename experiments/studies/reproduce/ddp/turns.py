"""The shared parts of the DDP paper's timings: ranks on a link, steps timed in turns, and pictures of latencies.

If ranks share cores, time is dilated (`commhooks.experiments.machine.dilation`), so that each has what one core
computes, as with the setting `compute` of runs. With four ranks on each core, compute takes four times as long, so the
link is slowed down by four as well, and every reported time is divided by four.

Models that are compared are in memory together, on the same ranks, and take a step each in turn: any other load on the
machine slows all of them equally. All ranks begin a step together, and it counts as it was on the rank that took
longest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor

from commhooks.experiments.devices import Stopwatch
from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings, Wire, parse_rate
from commhooks.experiments.links.linked_group import LinkedGroup
from commhooks.experiments.links.waits import WaitClock
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.training.measure import StepClock
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from experiments.studies.ranks import on_ranks, without_broadcasts
from experiments.studies.reproduce.ddp.hooks import Groups
from experiments.studies.turns import as_given, turns_of

K = TypeVar("K", bound=Hashable)
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


def take_turns(
    entrants: Mapping[K, Entrant], link: LinkSettings, ranks: int, count: int, tell: Tell, *, groups: int = 1
) -> dict[K, Taken]:
    """Return the seconds of every entrant's steps.

    Args:
        entrants: Who takes turns, by name.
        link: Of all ranks.
        ranks: The number of processes.
        count: Turns that each one takes.
        tell: Called with progress.
        groups: Process groups, which share the link.

    Raises:
        WorldError: A rank failed.

    """
    return on_ranks(partial(_take_turns, entrants, link, count, groups), ranks, tell, link=link)


def link_of(place: str, kind: str) -> LinkSettings:
    """Return the link of a place: the loopback, or links of a kind with a rate such as '1 Gbit/s'."""
    return LinkSettings() if place == LOOPBACK else LinkSettings(kind=kind, bits_per_second=parse_rate(place))


def place_in_words(place: str) -> str:
    """Return 'Over the loopback' or 'At 1 Gbit/s'."""
    return "Over the loopback" if place == LOOPBACK else f"At {place}"


def groups_on(link: LinkSettings, count: int = 1) -> list[dist.ProcessGroup]:
    """Return process groups of all ranks, the default one first; every rank calls this."""
    world = dist.group.WORLD
    assert world is not None, "ranks have a default group"
    return over(link, [world, *(dist.new_group() for _ in range(count - 1))])


def over(link: LinkSettings, groups: list[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Return the groups on the link: on an emulated one with a rate they share one wire, as hosts share their link."""
    if link.kind != "emulated" or link.bits_per_second is None:
        return groups
    wire = Wire(link)
    return [LinkedGroup(group, wire) for group in groups]


def end_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """End what `groups_on` started; DDPs on these groups must be gone."""
    gc.collect()  # a DDP that outlives its process group may abort the process
    for group in groups:
        if isinstance(group, LinkedGroup):
            group.close()


def warm_up(stepper: Stepper) -> None:
    """Take the steps before the first turn: DDPs rebuild their buckets after the first one."""
    for _ in range(2):
        stepper()


def whole(taken: Taken) -> list[float]:
    """Return the seconds of each step."""
    parts = (taken["forward"], taken["backward"], taken["exposed"], taken["optimizer"])
    return [sum(step) for step in zip(*parts, strict=True)]


def _take_turns(
    entrants: Mapping[K, Entrant], link: LinkSettings, count: int, groups: int, tell: Tell
) -> dict[K, Taken]:
    """Take all turns on one rank; return what they took on the slowest."""
    own = groups_on(link, groups)
    training = {name: _Training(entrant, own) for name, entrant in entrants.items()}
    turns = turns_of(
        {name: one.step for name, one in training.items()}, count, warm_up=_WARM_UP, order=as_given, tell=tell
    )
    spent = torch.tensor(list(turns.values()), dtype=torch.float64)  # entrants x turns x parts
    everyone = [torch.empty_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, spent)
    slowest = of_slowest(torch.stack(everyone))
    found = {name: one.taken(parts) for (name, one), parts in zip(training.items(), slowest, strict=True)}
    for one in training.values():
        one.close()
    end_groups(own)
    return found


def of_slowest(spent: Tensor) -> Tensor:
    """Return the parts of each step on the rank where it took longest: entrants x turns x parts, without ranks."""
    slowest = spent.sum(dim=-1).argmax(dim=0)  # entrants x turns
    return spent.gather(0, slowest[None, :, :, None].expand(1, -1, -1, spent.shape[-1]))[0]


class _Training:
    """One entrant on one rank."""

    def __init__(self, entrant: Entrant, groups: Groups) -> None:
        task = without_broadcasts(entrant.task)
        self._stepper = Stepper(task, wrap_in_ddp(task.model, entrant.ddp, entrant.bucket_mib, groups[0]))
        if entrant.register is not None:
            entrant.register(self._stepper.ddp, groups)
        self._clock = StepClock(self._stepper.ddp, task.model, WaitClock(), Stopwatch())

    def step(self) -> list[float]:
        """Take a step, and return the seconds of its parts."""
        one, batch = self._stepper, self._stepper.next_batch()
        dist.barrier()
        self._clock.begin()
        begun = time.perf_counter()
        loss = one.task.loss(one.ddp, batch)
        forward_ended = time.perf_counter()
        loss.backward()
        self._clock.backward_ended()
        backward_ended = time.perf_counter()
        one.optimizer.step()
        split = self._clock.end()
        one.optimizer.zero_grad()
        forward, optimizer = forward_ended - begun, begun + split.seconds - backward_ended
        return [forward, split.compute - forward - optimizer, split.compression + split.waiting, optimizer]

    def taken(self, spent: Tensor) -> Taken:
        """Return the turns that took this long, turns x parts."""
        sizes: str = self._stepper.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        forward, backward, exposed, optimizer = spent.T.tolist()
        return Taken(
            buckets=len(sizes.split(",")), forward=forward, backward=backward, exposed=exposed, optimizer=optimizer
        )

    def close(self) -> None:
        """Remove everything from the model: its DDP must go before the process groups do."""
        self._clock.remove()
        self._stepper.close()


def draw_quartiles(
    axes: Axes, places: Sequence[float], seconds: Sequence[Sequence[float]], *, colour: str, label: str
) -> None:
    """Draw the median of each measurement in milliseconds, with a bar from quartile to quartile."""
    spreads = [Spread.of(each) for each in seconds]
    medians = [1e3 * each.median for each in spreads]
    bars = [[1e3 * (each.median - each.low) for each in spreads], [1e3 * (each.high - each.median) for each in spreads]]
    axes.errorbar(places, medians, yerr=bars, color=colour, marker="o", markersize=4, capsize=3, label=label)


def label_axes(axes: Axes, title: str, label: str, places: Sequence[int]) -> None:
    """Give axes a title, milliseconds from 0 on, and these places on a logarithmic horizontal axis."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
