"""What a wrapped module must be like, checked before anything is communicated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter


def choose_process_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group to reduce over: the one given, the mesh's only dimension, or the default one.

    Raises RuntimeError for both a group and a mesh, or a mesh that is not 1-D; ValueError if there is no default group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)  # type: ignore[no-any-return]  # 'Returning Any from function declared to return "ProcessGroup"'
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group must be a ProcessGroup that this rank belongs to (got {process_group!r}); "
                "new_group() returns a placeholder on ranks outside the group"
            )
        return process_group
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group "
            "(torch.distributed.init_process_group) before DistributedDataParallel, or pass process_group=."
        )
    group = dist.group.WORLD
    assert group is not None, "is_initialized() says that there is a default group"
    return group


def check_module(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Refuse a module without a gradient, with lazy parameters, on mixed device types, or with SyncBatchNorm on CPU.

    ``parameters``: those that the wrapper manages, frozen ones included.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel` ({name!r} is "
                "one). Run a dummy forward pass to correctly initialize the modules."
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    types = {parameter.device.type for parameter in parameters}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {sorted(types)}."
        )
    if types == {"cpu"} and any(isinstance(submodule, nn.SyncBatchNorm) for submodule in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def choose_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[Tensor],
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Return the one device to which inputs are moved, as a list, and the output device; or (None, None).

    Raises ValueError for more than one id, and for ids of a module on the CPU or on several devices.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element. (got {list(device_ids)})")
    devices = {parameter.device for parameter in parameters}
    kind = next(iter(devices)).type
    if not device_ids or kind == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None, None
    chosen = _as_device(device_ids[0], kind)
    return [chosen], chosen if output_device is None else _as_device(output_device, kind)


def _as_device(device: int | torch.device, kind: str) -> torch.device:
    return torch.device(kind, device) if isinstance(device, int) else torch.device(device)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are synchronised (at construction, before each forward pass).

    ``forward_sync_buffers`` speaks only of the second; the older ``broadcast_buffers`` of both.
    """
    if broadcast_buffers is not None:
        ignored = " and is ignored, since both were given" if forward_sync_buffers is not None else ""
        warnings.warn(
            f"`broadcast_buffers` is deprecated{ignored}; use `forward_sync_buffers`. Note that "
            "forward_sync_buffers=False still copies rank 0's buffers once, at construction.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    return (True, True) if broadcast_buffers is None else (broadcast_buffers, broadcast_buffers)


def refuse(argument: str, given: bool, instead: str) -> None:
    """Refuse an argument of PyTorch's constructor that this class does not offer, naming what to use instead."""
    if given:
        raise NotImplementedError(f"DistributedDataParallel({argument}=...) is not offered by ddp_core; {instead}")


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters that will get sparse gradients: embeddings made with ``sparse=True``."""
    embeddings: Iterable[nn.Module] = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return {id(m.weight) for m in embeddings if m.sparse}
