"""Training with DiLoCo among workers of this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import nn

import commhooks
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask
from commhooks.experiments.tasks.task import mixed, seed_generators
from commhooks.experiments.training.seldom import settings_of
from commhooks.lockstep import lockstep_connections, step_in_lockstep
from experiments.studies.lockstep import Trained


def train_seldom_in_lockstep(
    tasks: Sequence[LoadedTask], hook: Spec, *, steps: int, start: int = 0, optimizer: Spec | None = None
) -> Trained:
    """Train a task with DiLoCo among workers of this process, in place, and return the outcome.

    Args:
        tasks: The same task under the same seed for each worker, with a model of its own.
        hook: DiLoCo, as in `commhooks compare`.
        steps: Optimizer steps of each worker.
        start: The number of first steps that are data-parallel: in each, uncompressed gradients are averaged. DiLoCo
            follows.
        optimizer: The inner optimizer; None: the task's own.

    """
    ranks, diverged = len(tasks), None
    optimizers = [task.optimizer(optimizer) for task in tasks]
    gradient_bytes = sum(4 * parameter.numel() for parameter in tasks[0].model.parameters())
    with contextlib.ExitStack() as team:
        workers: list[commhooks.DiLoCo] = []
        for step in range(steps):
            if step == start:
                settings = settings_of(hook, tasks[0].seed)
                for task, inner, connection in zip(tasks, optimizers, lockstep_connections(ranks), strict=True):
                    workers.append(commhooks.DiLoCo(task.model, inner, connection=connection, **settings))
                    team.callback(workers[-1].close)
            losses = [_backward(task, step, rank, ranks) for rank, task in enumerate(tasks)]
            if step < start:
                _average_gradients([task.model for task in tasks])
            for task, inner in zip(tasks, optimizers, strict=True):
                task.set_learning_rate(inner, step, steps)
                inner.step()
                inner.zero_grad()
            if workers:
                step_in_lockstep(workers)
            if not math.isfinite(sum(losses)):
                diverged = step + 1
                break
        with workers[0].outer_parameters() if workers else contextlib.nullcontext():
            judged = tasks[0].evaluate()
        sent = workers[0].statistics().traffic if workers else None
    dense = min(start, steps) * gradient_bytes
    return Trained(
        loss=judged["loss"],
        accuracy=judged.get("accuracy"),
        payload_bytes=(dense + (sent.payload_bytes if sent else 0)) / steps,
        moved_bytes=(2 * dense * (ranks - 1) // ranks + (sent.moved_bytes if sent else 0)) / steps,
        gradient_bytes=gradient_bytes,
        residual=None,
        diverged=diverged,
        vnmse=math.nan,
    )


def _backward(task: LoadedTask, step: int, rank: int, ranks: int) -> float:
    """Compute a worker's gradients on its share of the step's batch, and return its loss."""
    seed_generators(mixed(task.seed, step, rank))  # dropout, as if it were a rank by itself
    loss = task.loss(task.model, task.batch(step, rank, ranks))
    loss.backward()
    return loss.item()


def _average_gradients(models: Sequence[nn.Module]) -> None:
    """Give every model the mean of their gradients."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([parameter.grad for parameter in same]).mean(0)
        for parameter in same:
            parameter.grad = mean.clone()
