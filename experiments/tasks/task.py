"""What a task must provide so that it can be trained under any hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

SizeType = TypeVar("SizeType")


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step: inputs and targets."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Evaluation:
    """A model's performance on data that it was not trained on."""

    loss: float  # mean cross-entropy, in nats
    accuracy: float  # fraction of correct answers, 0 to 1
    bits_per_byte: float | None = None  # for language models: the loss in bits


class Task(Protocol):
    """A model, its data, its optimizer: everything except how gradients are communicated."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def size(self) -> str:
        """Which preset this is."""

    @property
    def default_steps(self) -> int:
        """How many optimizer steps a run takes by default."""

    @property
    def description(self) -> str:
        """One sentence about model, data and optimizer, for the report."""

    def with_batch_size(self, batch_size: int) -> Task:
        """Return the same task with another number of examples per rank and step."""

    @property
    def batch_size(self) -> int:
        """Examples per rank and step."""

    def model(self, seed: int) -> nn.Module:
        """Return a fresh model; the same seed gives the same bits."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for this model."""

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of one step of `steps`."""

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return this rank's batch of one step: a function of its arguments alone."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch, a scalar."""

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluate the model on held-out data; the model's mode is left unchanged."""


def size_named(sizes: Mapping[str, SizeType], size: str, task: str) -> SizeType:
    """Return the preset of this name.

    Raises:
        ValueError: There is no such preset.

    """
    if size not in sizes:
        raise ValueError(f"size {size!r} of task {task!r} is not known: expected one of {', '.join(sizes)}")
    return sizes[size]


def generator_for(*numbers: int) -> torch.Generator:
    """Return a generator whose numbers depend only on the given numbers."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 1) % (2**63 - 25)
    return torch.Generator().manual_seed(state)
