"""Functions that are no tasks, each for another reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


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
