"""Modules whose gradients can be told without a computer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import DistributedDataParallel

MEAN = 1.5  # of rank + 1 over two ranks


def wrap(module: nn.Module, **options: Any) -> Any:
    """Return the module in a DDP, of no type: its submodules are then of none either."""
    return DistributedDataParallel(module, **options)


def scale() -> nn.Linear:
    """Return a module of one weight: its gradient is the sum of the inputs."""
    return nn.Linear(1, 1, bias=False)


def ones(rank: int = 0, n: int = 1) -> Tensor:
    """Return an input of rank + 1: a gradient of that on this rank, and of ``MEAN`` when averaged over two."""
    return torch.full((1, n), rank + 1.0)


class Branches(nn.Module):
    """Weights ``a`` and ``b``, of which a forward pass uses those that it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = scale()
        self.b = scale()

    def forward(self, x: Tensor, use: str = "ab") -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in use]).sum()


class Outputs(nn.Module):
    """Returns what each of two weights makes of the input, in a container of choice."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.a = scale()
        self.b = scale()
        self.container = container

    def forward(self, x: Tensor) -> Any:
        return self.container(self.a(x), self.b(x))


class Words(nn.Module):
    """A sparse embedding of four words, and a dense weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)
        self.out = scale()

    def forward(self, word: int | None) -> Tensor:
        used = torch.zeros(()) if word is None else self.words(torch.tensor([word])).sum()
        return torch.as_tensor(used + self.out(ones()).sum())


def grads(module: nn.Module) -> list[list[float] | None]:
    """Return every parameter's gradient, flat."""
    return [None if p.grad is None else p.grad.to_dense().flatten().tolist() for p in module.parameters()]
