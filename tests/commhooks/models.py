"""Shapes and small models that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ddp_core
from experiments.bench.given import Shape as Shape  # tests import it from here
from experiments.tasks.lstm import LstmModel


def wrap(kind: str, module: nn.Module, **settings: Any) -> nn.Module:
    """Wrap a module in ddp_core's DDP ("core") or PyTorch's ("torch")."""
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module, **settings)
    return ddp_core.DistributedDataParallel(module, **settings)


class Given(nn.Module):
    """A model with parameters of given shapes, whose gradients are the inputs of `forward`."""

    def __init__(self, *shapes: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *gradients: Tensor) -> Tensor:
        terms = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).sum()


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Return a copy of every parameter's gradient."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def lstm_shapes() -> list[Shape]:
    """Return the parameter shapes of a three-layer LSTM of 650 for WikiText-2, encoder tied to decoder."""
    with torch.device("meta"):
        model = LstmModel(650, 3, vocabulary=28869)
    return [tuple(p.shape) for p in (model.symbols, *model.layers.parameters(), model.bias)]
