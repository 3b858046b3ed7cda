"""Small models that FSDP2 shards, and their training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.commhooks.ranks import of_every_rank

Make = Callable[[nn.Module], torch.optim.Optimizer]
INPUTS, CLASSES = 20, 7
MODULES = ["the model", "first", "second.wide"]
FP32 = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
UNSAID = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
"""Reduces in bf16 up to PyTorch 2.14, and from 2.15 on in the parameters' `grad_dtype`."""
reduces_in_grad_dtype = hasattr(torch.Tensor, "_has_grad_dtype_override")
follows_grad_dtype = pytest.mark.skipif(
    not reduces_in_grad_dtype, reason="this PyTorch's FSDP2 does not ask parameters for their grad_dtype"
)


class Network(nn.Module):
    """Two layers that are FSDP modules, and a head and a vector that belong to the root, as an unused layer does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(INPUTS, 65)
        self.second = nn.ModuleDict({"wide": nn.Linear(65, 130), "unused": nn.Linear(3, 4)})
        self.head = nn.Linear(130, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.second["wide"](x).tanh()
        y: Tensor = self.head(x)
        return self.scale * y


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def sites() -> DeviceMesh:
    """Return the mesh of four ranks in two sites, each of which has the whole model."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


@functools.cache
def alone() -> DeviceMesh:
    """Return the mesh of ranks each of which has the whole model."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))


@functools.cache
def everyone() -> DeviceMesh:
    """Return the mesh of all ranks, which share one model."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(
    policy: MixedPrecisionPolicy = FP32,
    *,
    frozen: bool = False,
    mesh: DeviceMesh | None = None,
    model: Network | None = None,
    **settings: Any,
) -> Network:
    """Return the network, a new one or `model`, sharded over a mesh or all ranks, three FSDP modules."""
    model = model or Network()
    if frozen:
        model.first.bias.requires_grad_(False)
    for module in (model.first, model.second["wide"], model):
        fully_shard(module, mesh=everyone() if mesh is None else mesh, mp_policy=policy, **settings)
    return model


def with_grad_dtypes(
    policy: MixedPrecisionPolicy, wanted: dict[str, Any], *, later: bool, mesh: DeviceMesh | None = None
) -> Network:
    """Return the sharded network; parameters whose names begin with a key get its dtype, before or after sharding."""
    model = sharded(policy, mesh=mesh) if later else Network()
    for name, parameter in model.named_parameters():
        for beginning, dtype in wanted.items():
            if name.startswith(beginning):
                parameter.grad_dtype = dtype
    return model if later else sharded(policy, model=model, mesh=mesh)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, INPUTS, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """Run a forward and a backward pass on the batch of a step; return the loss."""
    inputs, targets = batch(rank, step)
    loss = nn.functional.cross_entropy(model(inputs).float(), targets)
    loss.backward()
    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int, *, accumulated: int = 1
) -> float:
    """Run steps first to last - 1, each of so many batches of which only the last one synchronises."""
    loss = torch.zeros(())
    for step in range(first, last):
        for part in range(accumulated):
            if accumulated > 1:
                model.set_requires_gradient_sync(part == accumulated - 1)  # type: ignore[operator]  # FSDPModule's
            inputs, targets = batch(rank, accumulated * step + part)
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
            (loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def shards(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of what this rank keeps of the parameters."""
    named: dict[str, Any] = dict(model.named_parameters())
    return {name: parameter.to_local().detach().clone() for name, parameter in named.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of what this rank keeps of the gradients."""
    named: dict[str, Any] = dict(model.named_parameters())
    return {name: parameter.grad.to_local().clone() for name, parameter in named.items()}


def assert_ranks_agree(model: nn.Module) -> None:
    """Assert that two ranks keep the same of the parameters."""
    one, other = of_every_rank(shards(model))
    assert furthest(one, other) == 0


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two ranks' shards or states."""
    assert one.keys() == other.keys()
    return max((float((one[name] - other[name]).abs().max()) for name in one if one[name].numel()), default=0.0)
