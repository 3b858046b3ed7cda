"""The shards of a model: each rank of a site keeps some, and averages them with their keepers at other sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.tensors import local
from commhooks.unwrapping import reshard


def shaped_like(parameter: Tensor, own: Tensor) -> Tensor:
    """Return `own` in a parameter's dtype and device; as the shard of a DTensor if the parameter is one.

    The result may be `own` itself.
    """
    if not hasattr(parameter, "to_local"):
        return own.to(parameter.device, parameter.dtype)
    sharded = parameter.detach().clone()
    local(sharded).copy_(own)
    return sharded


class Shards:
    """The meshes over which a model's parameters are sharded (FSDP2, tensor parallelism): none, for whole ones."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._meshes = list(dict.fromkeys(p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")))

    def places(self) -> Sequence[str]:
        """Return, in words, the part of the model that this rank keeps; ranks that average must keep the same part."""
        return [f"shard {mesh.get_coordinate()} of {tuple(mesh.mesh.shape)}" for mesh in self._meshes]

    def ranks(self) -> set[int]:
        """Return the ranks that keep the parts of this model, this one among them; none for whole parameters."""
        return {rank for mesh in self._meshes for rank in mesh.mesh.flatten().tolist()}

    def all_agree(self, yes: bool) -> bool:
        """Return whether `yes` is true on all ranks that keep a part of this model; each of them must call it."""
        told = torch.tensor(float(yes), dtype=torch.float32, device="cpu")
        for mesh in self._meshes:
            for dimension in range(mesh.ndim):
                told = told.to(mesh.device_type)
                dist.all_reduce(told, dist.ReduceOp.MIN, group=mesh.get_group(dimension))
        return bool(told)

    def reshard(self) -> None:
        """Return modules that FSDP2 has gathered to their shards, before the shards change."""
        if self._meshes:
            reshard(self._model)
