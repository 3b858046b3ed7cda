"""What the ranks of a cluster measure: what the model needs, without a limited link, and then real steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.planning import Profile
from experiments.cluster import Cluster, set_rate
from experiments.launch import Send
from experiments.links.link import LinkSettings
from experiments.planning.profiling import Asked as ProfileAsked
from experiments.planning.profiling import profile_step
from experiments.runs import RunSettings
from experiments.specs import Spec
from experiments.tasks import LoadedTask, load_task
from experiments.training.registration import register, wrap_in_ddp
from experiments.training.stepper import Stepper

from ...predictions.compute import ComputeClock, ComputeTimes

_PROBES = 9
_LARGE = 1_000_000  # elements of fp32
_WARM_UP = 2  # steps that are not counted


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a world measures."""

    task: Spec
    hooks: tuple[Spec, ...]
    rates: tuple[float, ...]  # bits per second, as reported
    kind: str
    steps: int
    bucket_cap_mb: float
    dilation: float  # seconds here for one second as reported
    cores: int  # how many ranks profile at once
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Unlimited:
    """What was measured while links had no limit, in seconds here."""

    profile: Profile | None  # as one of the ranks, on a core that no other uses; None: on a rank that has none
    hop_seconds: float  # that a message of a few bytes takes
    seconds_per_byte: float  # that a rank sends


@dataclass(frozen=True)
class Case:
    """Real steps, and what the model is given for them: nothing that was measured over a limited link."""

    rate: float
    hook: str
    seconds: tuple[float, ...]  # of each real step, as reported
    compute: ComputeTimes  # of steps without communication, in turns with the real ones: each step's slowest rank's
    unlimited: Unlimited


def run_steps(rank: int, ranks: int, work: Work, send: Send) -> None:
    """Measure the cases of each rate; what the model is given, anew for each, as a machine's other load changes."""
    torch.set_num_threads(1)
    task, alone = load_task(work.task), load_task(work.task)
    clock = ComputeClock(alone, work.bucket_cap_mb)
    clock.warm_up(alone.batch(0, rank, ranks))
    on_cores = range(min(ranks, work.cores))
    group = dist.new_group(on_cores)
    for rate in work.rates:
        set_rate(work.cluster, rank, None)
        unlimited = _unlimited(work, group if rank in on_cores else None, rank, ranks)
        set_rate(work.cluster, rank, rate / work.dilation)
        for spec in work.hooks:
            seconds = _steps(task, clock, spec, rate, work)
            compute = clock.take(lambda times: dist.all_reduce(times, dist.ReduceOp.MAX))
            if rank == 0:
                reported = tuple(one / work.dilation for one in seconds)
                send(Case(rate, spec.label, reported, compute, unlimited))
    del clock  # a DDP must go before its process group does


def _unlimited(work: Work, group: dist.ProcessGroup | None, rank: int, ranks: int) -> Unlimited:
    small = _median_seconds(lambda: dist.all_reduce(torch.zeros(1)))
    large = _median_seconds(lambda: dist.all_reduce(torch.zeros(_LARGE)))
    sent = 2 * (ranks - 1) / ranks * 4 * _LARGE
    profile = None
    if group is not None:
        task = load_task(work.task)
        step = Stepper(task, wrap_in_ddp(task.model, "core", work.bucket_cap_mb, group))
        asked = ProfileAsked(task=work.task, hooks=work.hooks, link=LinkSettings(), steps=work.steps)
        profile = profile_step(step, asked, as_ranks=ranks, group=group)
        del step.ddp  # a DDP must go before its process group does
    return Unlimited(profile, small / (2 * (ranks - 1)), max(0.0, large - small) / sent)


def _steps(task: LoadedTask, clock: ComputeClock, spec: Spec, rate: float, work: Work) -> list[float]:
    """Return the seconds of real steps, each of which follows one without communication."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    link = LinkSettings(kind=work.kind, bits_per_second=rate)
    settings = RunSettings(task=work.task, hook=spec, ranks=ranks, link=link, bucket_cap_mb=work.bucket_cap_mb)
    registered = register(settings, task.model, work.dilation)
    optimizer = task.optimizer()
    found = []
    for step in range(_WARM_UP + work.steps):
        batch = task.batch(step, rank, ranks)
        dist.barrier()
        if step >= _WARM_UP:
            clock.step(batch)
            dist.barrier()
        begun = time.perf_counter()
        task.loss(registered.ddp, batch).backward()
        optimizer.step()
        found.append(time.perf_counter() - begun)
        optimizer.zero_grad()
    registered.detach()
    means = torch.tensor(found[_WARM_UP:], dtype=torch.float64)
    dist.all_reduce(means)
    seconds: list[float] = (means / ranks).tolist()
    return seconds


def _median_seconds(action: Callable[[], object]) -> float:
    found = []
    for _ in range(_PROBES):
        dist.barrier()
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)
