"""Real steps under several hooks, in turns with steps without communication, from whose compute they are predicted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ddp_core
from commhooks.experiments.launch import Tell
from commhooks.experiments.machine import dilation
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.kinds import register
from commhooks.experiments.training.stepper import Stepper
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import as_given, turns_of

_WARM_UP = 3  # turns that are not counted: memory is allocated in them, and DDPs rebuild their buckets


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps at one rate, in seconds as reported: on ranks with a core each."""

    compute: float  # forward and backward pass, without communication; median of each step's slowest rank
    optimizer: float
    ready: tuple[float, ...] = ()  # of each bucket, after the step began; earlier files have none
    seconds: Mapping[str, tuple[float, ...]]  # of each hook's steps, the mean over the ranks


def measure_steps(settings: RunSettings, hooks: Sequence[str], turns: int, tell: Tell) -> Steps:
    """Return the steps of new ranks. With fewer cores than ranks, links and reported times are slowed down alike.

    Args:
        settings: The task, the ranks, their link and the bucket size.
        hooks: Each has a model of its own.
        turns: How many steps of each count.
        tell: Called with a text after each turn.

    Raises:
        WorldError: A rank failed.

    """
    link = settings.link.slowed(dilation(settings.ranks))
    return on_ranks(partial(_take, settings, hooks, turns), settings.ranks, tell, link=link)


def _take(settings: RunSettings, hooks: Sequence[str], turns: int, tell: Tell) -> Steps:
    slow = dilation(settings.ranks)
    came: list[float] = []
    alone = load_task(settings.task)
    ddp = ddp_core.DistributedDataParallel(alone.model, bucket_cap_mb=settings.bucket_cap_mb)
    ddp.register_comm_hook(came, _answer)
    tasks = {hook: load_task(settings.task) for hook in hooks}
    registered = {
        hook: register(dataclasses.replace(settings, hook=Spec.parse(hook)), task, slow) for hook, task in tasks.items()
    }
    steppers = {"": Stepper(alone, ddp)} | {hook: Stepper(tasks[hook], registered[hook].ddp) for hook in hooks}
    contenders = {name: partial(_step, stepper, came) for name, stepper in steppers.items()}
    taken = turns_of(contenders, turns, warm_up=_WARM_UP, order=as_given, tell=tell)
    for stepper in steppers.values():
        stepper.close()
    for one in registered.values():
        one.close()
    without = torch.tensor(taken.pop(""), dtype=torch.float64) / slow
    dist.all_reduce(without, dist.ReduceOp.MAX)
    compute, optimizer, *ready = np.median(without.numpy(), axis=0).tolist()
    moments = np.maximum.accumulate(ready).clip(max=compute).tolist()
    seconds = torch.tensor([[sum(parts[:2]) for parts in own] for own in taken.values()], dtype=torch.float64) / slow
    dist.all_reduce(seconds)
    by_hook = zip(hooks, map(tuple, (seconds / settings.ranks).tolist()), strict=True)
    return Steps(compute=compute, optimizer=optimizer, ready=tuple(moments), seconds=dict(by_hook))


def _step(stepper: Stepper, came: list[float]) -> list[float]:
    """Return the seconds of forward and backward pass, of the optimizer, and until each bucket came to `_answer`.

    All ranks begin a step together.
    """
    batch = stepper.next_batch()
    came.clear()
    dist.barrier()
    begun = time.perf_counter()
    stepper.task.loss(stepper.ddp, batch).backward()
    computed = time.perf_counter()
    stepper.optimizer.step()
    updated = time.perf_counter()
    stepper.optimizer.zero_grad()
    return [computed - begun, updated - computed, *(moment - begun for moment in came)]


def _answer(came: list[float], bucket: ddp_core.GradBucket) -> torch.futures.Future[Tensor]:
    """Note when a bucket came, and send nothing."""
    came.append(time.perf_counter())
    answered: torch.futures.Future[Tensor] = torch.futures.Future()
    answered.set_result(bucket.buffer())
    return answered
