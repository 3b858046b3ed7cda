"""What the ranks of a cluster measure: what the model needs, without a limited link, and then real steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...launch import Send
from ...leaderboard.lockstep import own_gradients
from ...links.link import LinkSettings
from ...runs import RunSettings
from ...simulate.measured import ComputeTimes, HookTimes
from ...simulate.measuring import Asked, measure_compute, measure_hook
from ...specs import Spec
from ...tasks import LoadedTask, load_task
from ...training.registration import register

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
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Inputs:
    """What the model is given, in seconds here: nothing of it was measured over a limited link."""

    compute: ComputeTimes
    hop_seconds: float  # that a message of a few bytes takes
    seconds_per_byte: float  # that a rank sends, over links without a limit


@dataclass(frozen=True)
class Case:
    """Real steps."""

    rate: float
    hook: str
    seconds: tuple[float, ...]  # of each step, as reported


def time_compression(rank: int, ranks: int, argument: tuple[Work, ComputeTimes, int], send: Send) -> None:
    """Time every hook among as many workers as the cluster has ranks, in each of a few processes at once."""
    torch.set_num_threads(1)
    work, compute, workers = argument
    task = load_task(work.task)
    _, gradients = own_gradients(task, 0, workers)
    asked = Asked(task=work.task, hooks=work.hooks, workers=(workers,))
    for spec in work.hooks:
        dist.barrier()
        times: HookTimes = measure_hook(spec, compute, gradients, asked)
        if rank == 0:
            send((spec.label, times))


def run_steps(rank: int, ranks: int, work: Work, send: Send) -> None:
    """Measure compute and the link without a limit, then real steps at every rate under every hook."""
    torch.set_num_threads(1)
    task = load_task(work.task)
    told = send if rank == 0 else _silent
    compute = measure_compute(task, work.steps, work.bucket_cap_mb, rank=rank, ranks=ranks, meet=dist.barrier)
    small = _median_seconds(lambda: dist.all_reduce(torch.zeros(1)))
    large = _median_seconds(lambda: dist.all_reduce(torch.zeros(_LARGE)))
    sent = 2 * (ranks - 1) / ranks * 4 * _LARGE
    told(Inputs(_mean_over_ranks(compute, ranks), small / (2 * (ranks - 1)), max(0.0, large - small) / sent))
    for rate in work.rates:
        if work.cluster is not None:
            if rank == 0:
                work.cluster.set_rate(rate / work.dilation)
            dist.barrier()
        for spec in work.hooks:
            seconds = _steps(task, spec, rate, work, rank, ranks)
            told(Case(rate, spec.label, tuple(one / work.dilation for one in seconds)))


def _steps(task: LoadedTask, spec: Spec, rate: float, work: Work, rank: int, ranks: int) -> list[float]:
    """Return the seconds from the end of each step to the end of the next."""
    link = LinkSettings(kind=work.kind, bits_per_second=rate)
    settings = RunSettings(task=work.task, hook=spec, ranks=ranks, link=link, bucket_cap_mb=work.bucket_cap_mb)
    registered = register(settings, task.model, work.dilation)
    optimizer = task.optimizer()
    batches = [task.batch(step, rank, ranks) for step in range(_WARM_UP + work.steps)]
    ends = []
    for batch in batches:
        task.loss(registered.ddp, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    registered.detach()
    return [after - before for before, after in zip(ends[_WARM_UP - 1 :], ends[_WARM_UP:], strict=False)]


def _mean_over_ranks(compute: ComputeTimes, ranks: int) -> ComputeTimes:
    means = torch.tensor([compute.seconds, compute.optimizer, *compute.ready], dtype=torch.float64)
    dist.all_reduce(means)
    seconds, optimizer, *ready = (means / ranks).tolist()
    return ComputeTimes(seconds, optimizer, tuple(ready), compute.buckets)


def _median_seconds(action: Callable[[], object]) -> float:
    found = []
    for _ in range(_PROBES):
        dist.barrier()
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _silent(message: object) -> None:
    """Send nothing: only rank 0 reports."""
