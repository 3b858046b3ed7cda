"""A plain training step, for measurements that need nothing else."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from commhooks.experiments.tasks import LoadedTask


class Stepper:
    """A task's model in its DistributedDataParallel, which takes a step with each call."""

    def __init__(self, task: LoadedTask, ddp: nn.Module, *, same_batch: bool = False) -> None:
        """Take the steps of this rank.

        Args:
            task: The model, its batches and its optimizer.
            ddp: The model in its DDP.
            same_batch: Take each step on the first batch, so that steps differ in nothing but their time.

        """
        self.task = task
        self.ddp: Any = ddp
        self.optimizer: Optimizer = task.optimizer()
        self._taken = 0
        self._batch = self.next_batch() if same_batch else None

    @property
    def parameters(self) -> int:
        """The number of elements of the model's parameters."""
        return sum(parameter.numel() for parameter in self.task.model.parameters())

    def next_batch(self) -> Any:
        """Return this rank's part of the next step's batch."""
        batch = self.task.batch(self._taken, dist.get_rank(), dist.get_world_size())
        self._taken += 1
        return batch

    def backward(self) -> None:
        """Run the forward and the backward pass."""
        batch = self.next_batch() if self._batch is None else self._batch
        self.task.loss(self.ddp, batch).backward()

    def __call__(self) -> None:
        """Run the forward and the backward pass, and the optimizer; then drop the gradients."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Remove the DDP, which must go before its process group does."""
        del self.ddp
