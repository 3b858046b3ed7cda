"""Shapes and small models that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ddp_core

Shape = tuple[int, ...]


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


def resnet18_shapes() -> list[Shape]:
    """Return the parameter shapes of the CIFAR form of ResNet-18."""
    shapes: list[Shape] = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(channels, inputs, 3, 3), (channels,), (channels,)]
            shapes += [(channels, channels, 3, 3), (channels,), (channels,)]
            if block == 0 and inputs != channels:
                shapes += [(channels, inputs, 1, 1), (channels,), (channels,)]
            inputs = channels
    return [*shapes, (10, 512), (10,)]


def lstm_shapes() -> list[Shape]:
    """Return the parameter shapes of a three-layer LSTM of 650 for WikiText-2, encoder tied to decoder."""
    layer: list[Shape] = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28869, 650), *layer, *layer, *layer, (28869,)]
