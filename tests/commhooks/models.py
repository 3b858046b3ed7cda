"""Shapes and small models that several tests share."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp_core
from commhooks.experiments.tasks.lstm import LstmModel
from experiments.studies.bench.given import Shape as Shape  # tests import it from here


def wrap(kind: str, module: nn.Module, **settings: Any) -> nn.Module:
    """Wrap a module in ddp_core's DDP ("core") or PyTorch's ("torch")."""
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module, **settings)
    return ddp_core.DistributedDataParallel(module, **settings)


def torchs_takes(argument: str) -> bool:
    """Return whether this PyTorch's DDP has an argument."""
    return argument in inspect.signature(nn.parallel.DistributedDataParallel).parameters


def gloo_sums_complex_numbers() -> bool:
    """Return whether this PyTorch's Gloo does: 2.6 raises 'Invalid scalar type', on every rank."""
    try:
        work = dist.distributed_c10d._get_default_group().allreduce([torch.zeros(1, dtype=torch.complex64)])
        work.wait()
    except RuntimeError:
        return False
    return True


class Given(nn.Module):
    """A model with parameters of given shapes, whose gradients are the inputs of `forward`."""

    def __init__(self, *shapes: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *gradients: Tensor) -> Tensor:
        terms = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).sum()


class SparseTables(nn.ModuleList):
    """Many sparse embeddings: each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 2, sparse=True) for _ in range(20))

    def forward(self, words: Tensor) -> Tensor:
        return torch.stack([table(words).sum() for table in self]).sum()


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Return a copy of every parameter's gradient."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def lstm_shapes() -> list[Shape]:
    """Return the parameter shapes of a three-layer LSTM of 650 for WikiText-2, encoder tied to decoder."""
    with torch.device("meta"):
        model = LstmModel(650, 3, vocabulary=28869)
    return [tuple(p.shape) for p in (model.symbols, *model.layers.parameters(), model.bias)]


def shapes(matrices: int) -> list[Shape]:
    """Return the shapes of so many matrices, with vectors and scalars in between."""
    return [
        shape
        for i in range(matrices)
        for shape in ((24 + i % 5, 32) if i % 8 else (6, 5, 5, 5), *[(7,)] * (i % 3 == 0), *[()] * (i % 10 == 0))
    ]


MODELS: dict[int, tuple[list[Shape], float]] = {
    1: (shapes(14), 100.0),
    7: (shapes(14), 0.0045),
    40: (shapes(40), 0.0025),
}
"""By the number of buckets that come of them: shapes, and bucket_cap_mb. Every bucket has one matrix at least."""


def digest_of(tensors: list[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.digest()
