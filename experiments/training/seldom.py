"""Training with DiLoCo in place of a DistributedDataParallel with a hook."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import commhooks
from commhooks.lockstep import lockstep_connections, step_in_lockstep

from ..hooks import make_hook
from ..seldom import Seldom
from ..specs import Spec
from ..tasks import LoadedTask
from ..tasks.task import mixed, seed_generators
from .lockstep import Trained


def settings_of(hook: Spec, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of `commhooks.DiLoCo` after model and optimizer; random numbers follow the seed.

    Raises:
        ValueError: A setting does not exist or cannot work, or there is no such compressor.

    """
    asked = Seldom.of(hook)
    return {
        "every": asked.every,
        "compressor": make_hook(asked.compressor, seed),
        "outer": asked.outer,
        "fragments": asked.fragments,
        "arrangement": asked.arrangement,
        "delay": asked.delay,
        "mixing": float(asked.mixing),
    }


def check_diloco(hook: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Raise ValueError if DiLoCo does not accept the model, the optimizer or a setting, or no round ends in the run."""
    commhooks.DiLoCo(model, optimizer, connection=lockstep_connections(1)[0], **settings_of(hook)).close()
    every = Seldom.of(hook).every
    if every > steps:
        raise ValueError(
            f"hook {hook.label!r}: a run of {steps} steps ends before the first round; let it take at least {every}"
        )


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
