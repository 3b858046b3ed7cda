"""A task in which a careless measurement goes wrong: tied weights, buffers, two forward passes, three generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CLASSES, WIDTH = 40, 16
ELEMENTS = CLASSES * WIDTH + 2 * WIDTH + WIDTH * WIDTH + WIDTH  # the tied weight once


class Odd(nn.Module):
    """A bag of embeddings, whose embedding is its last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.middle(self.norm(self.embedding(tokens).mean(1))))
        noise = random.random() + np.random.rand()  # noqa: NPY002  # as others' code draws
        return functional.linear(hidden * noise, self.embedding.weight)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean of two losses, as consistency training has it."""
    tokens, labels = batch
    return sum((functional.cross_entropy(model(tokens), labels) for _ in range(2)), torch.zeros(())) / 2


def task() -> tuple[nn.Module, object, object]:
    """Return the model, random data and the loss."""
    return Odd(), [(torch.randint(CLASSES, (4,)), torch.randint(CLASSES, ())) for _ in range(200)], loss


# Functions that are no tasks, each for another reason.


def nothing() -> None:
    """Return no task."""


def no_scalar() -> tuple[Any, ...]:
    """Return a task whose loss has a value for each example."""
    return _task(lambda model, batch: model(batch[0]).sum(1))


def fails() -> tuple[Any, ...]:
    """Return a task whose model does not take its data."""
    return _task(lambda model, batch: model(batch[0].T).mean())


def _task(loss: Any) -> tuple[nn.Module, TensorDataset, Any]:
    data: Tensor = torch.zeros(200, 3)
    return nn.Linear(3, 2), TensorDataset(data), loss
