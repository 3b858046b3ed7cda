"""The compute of steps without communication, timed in turns with real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ddp_core
from experiments.tasks import LoadedTask

_WARM_UP = 2  # steps that are not counted


@dataclass(frozen=True)
class ComputeTimes:
    """A step without communication: median seconds over the steps."""

    seconds: float  # forward and backward pass
    optimizer: float
    ready: tuple[float, ...]  # of each bucket, seconds after the step began


class ComputeClock:
    """A task's model in a DDP whose hook answers at once: its steps are timed, and when each bucket came.

    With several ranks, each of them has one, and all take their steps together.
    """

    def __init__(self, task: LoadedTask, bucket_cap_mb: float | None) -> None:
        self._task = task
        self._came: list[float] = []
        self._ddp = ddp_core.DistributedDataParallel(task.model, bucket_cap_mb=bucket_cap_mb)
        self._ddp.register_comm_hook(None, self._answer)
        self._optimizer = task.optimizer()
        self._steps: list[tuple[float, float, list[float]]] = []

    def step(self, batch: Any) -> None:
        """Take a step, and time it."""
        self._came.clear()
        begun = time.perf_counter()
        self._task.loss(self._ddp, batch).backward()
        computed = time.perf_counter()
        self._optimizer.step()
        updated = time.perf_counter()
        self._steps.append((computed - begun, updated - computed, [moment - begun for moment in self._came]))
        self._optimizer.zero_grad()

    def take(self, over_ranks: Callable[[Tensor], object] = lambda times: None) -> ComputeTimes:
        """Return the medians of the steps since the last call, and forget them.

        `over_ranks` may replace each step's times, the rows of a tensor, in place with those of all ranks together.
        """
        times = torch.tensor([[compute, update, *ready] for compute, update, ready in self._steps], dtype=torch.float64)
        self._steps.clear()
        over_ranks(times)
        seconds, optimizer, *ready = np.median(times.numpy(), axis=0).tolist()
        moments = np.maximum.accumulate(ready).clip(max=seconds)
        return ComputeTimes(seconds, optimizer, tuple(moments.tolist()))

    def warm_up(self, batch: Any) -> None:
        """Take steps that are not counted: memory is allocated in them, and the DDP rebuilds its buckets."""
        for _ in range(_WARM_UP):
            self.step(batch)
        self._steps.clear()

    def _answer(self, state: object, bucket: ddp_core.GradBucket) -> torch.futures.Future[Tensor]:
        self._came.append(time.perf_counter())
        answered: torch.futures.Future[Tensor] = torch.futures.Future()
        answered.set_result(bucket.buffer())
        return answered
