"""The share of communication that overlaps the backward pass.

Three things are timed in turns: a local step (compute), the collectives of a step with nothing to compute
(communication), and a step under DDP, which does both.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.communicators import Collective, Communicator, Pending, ProcessGroupCommunicator
from commhooks.experiments.launch import Send
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.planning.worlds import around, run_over
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.runs import check_ddp
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from experiments.studies.turns import as_given, in_turns

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class OverlapSettings:
    """The settings of a measurement."""

    task: Spec = field(default_factory=lambda: Spec("gpt"))  # with a setting `batch_size`, which is chosen here
    ranks: int = 2
    link: LinkSettings
    rounds: int = 9  # higher: a steadier median
    ddp: str = "core"
    bucket_cap_mb: float = 0.5  # lower: communication begins earlier in the backward pass
    seed: int = 0

    def __post_init__(self) -> None:
        if self.link.bits_per_second is None:
            raise ValueError(
                "overlap needs a rate, such as --link 100Mbit/s: without a limit there is no communication time to hide"
            )
        if self.ranks < 2 or self.rounds < 1:
            raise ValueError(f"overlap needs at least 2 ranks and 1 round (got {self.ranks} and {self.rounds})")
        check_ddp("OverlapSettings", self.ddp, self.bucket_cap_mb)


@dataclass(frozen=True)
class Round:
    """One round's seconds, each the longest over the ranks."""

    compute: float
    communication: float
    step: float

    @property
    def ratio(self) -> float:
        """The step over the sum of its parts: 1.0 means no overlap."""
        return self.step / (self.compute + self.communication)


@dataclass(frozen=True)
class OverlapResult:
    """All rounds, and the batch size for which compute and communication take about the same time."""

    settings: OverlapSettings
    batch_size: int
    buckets: int
    rounds: tuple[Round, ...]

    @property
    def ratio(self) -> Spread:
        """Step / (compute + communication): median and quartiles over the rounds."""
        return Spread.of([each.ratio for each in self.rounds])


def measure_overlap(settings: OverlapSettings) -> OverlapResult | None:
    """Time the three in turns, and return the result; None on torchrun's ranks other than 0.

    Raises:
        ValueError: The task's function fails, or has no parameter `batch_size`.
        WorldError: A rank failed.

    """
    _with_batch_size(settings, 1)
    found: list[Any] = []
    run_over(settings.link, _rank, settings.ranks, settings, found.append, timeout=_TIMEOUT_SECONDS)
    return found[0] if found else None


class _Noting:
    """A communicator that records the sizes of the collectives that it starts."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.sizes: list[int] = []

    def start(self, collective: Collective) -> Pending:
        self.sizes.append(collective.tensor.numel())
        return self._inner.start(collective)


def _rank(rank: int, ranks: int, settings: OverlapSettings, send: Send) -> None:
    """Time the three on one rank; rank 0 sends the result."""
    torch.set_num_threads(1)
    task = _balanced(settings)
    batch = task.batch(0, rank, ranks)
    local = task.model
    noting: list[_Noting] = []
    ddp = wrap_in_ddp(copy.deepcopy(local), settings.ddp, settings.bucket_cap_mb)

    over = around(settings.link)

    def wrap(inner: Communicator) -> Communicator:
        noting.append(_Noting(inner if over is None else over(inner)))
        return noting[-1]

    attachment = commhooks.attach(ddp, commhooks.make_compressor("all-reduce"), wrap_communicator=wrap)
    try:
        for model in (local, ddp, ddp):  # DDP rebuilds its buckets after the first step
            noting[0].sizes.clear()
            _step(task, model, batch)
        sizes = list(noting[0].sizes)
        group = ProcessGroupCommunicator()
        link = group if over is None else over(group)
        actions: dict[str, Callable[[], None]] = {
            "compute": partial(_step, task, local, batch),
            "communication": partial(_communicate, link, sizes),
            "step": partial(_step, task, ddp, batch),
        }
        seconds = in_turns(actions, settings.rounds, warm_up=0, order=as_given)
        rounds = tuple(map(Round, *seconds.values()))
    finally:
        attachment.close()
    if rank == 0:
        send(OverlapResult(settings, task.task.batch_size, len(sizes), rounds))


def _step(task: LoadedTask, model: nn.Module, batch: Any) -> None:
    """Run the forward and the backward pass; gradients are kept, as between two steps of accumulation."""
    task.loss(model, batch).backward()
    model.zero_grad()


def _communicate(link: Communicator, sizes: list[int]) -> None:
    """Run the collectives of a step, one after another, with nothing to compute."""
    for pending in [link.start(Collective("all-reduce", torch.zeros(size))) for size in sizes]:
        pending.wait()


def _balanced(settings: OverlapSettings) -> LoadedTask:
    """Return the task with the batch size for which compute takes about as long as the link needs for the gradients."""
    task = load_task(settings.task, settings.seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gradients = Collective("all-reduce", torch.empty(sum(p.numel() for p in task.model.parameters())))
    wanted = settings.link.seconds_for(gradients, ranks)
    for _ in range(3):  # the resulting batch is timed again: a step's cost is not quite linear in it
        step = partial(_step, task, task.model, task.batch(0, rank, ranks))
        seconds = statistics.median(in_turns({"step": step}, 3, warm_up=1)["step"])
        task = _with_batch_size(settings, max(1, round(task.task.batch_size * wanted / seconds)))
    return task


def _with_batch_size(settings: OverlapSettings, batch_size: int) -> LoadedTask:
    """Return the task with this batch size; raise ValueError if its function has no parameter `batch_size`."""
    others = [pair for pair in settings.task.settings if pair[0] != "batch_size"]
    return load_task(Spec(settings.task.name, (*others, ("batch_size", batch_size))), settings.seed)
